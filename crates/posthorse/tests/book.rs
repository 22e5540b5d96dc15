//! The tables of the book say what the code says.
#![cfg(all(feature = "shm", feature = "tcp"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use posthorse::engine::environment::PREFIX;
use posthorse::transport::{ShmConfig, TcpConfig};
use posthorse::{ConnectorConfig, EngineConfig, ErrorKind};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// The cells of the rows of the table that follows `<!-- table: name -->` on a page of the book.
fn table(page: &str, name: &str) -> Vec<Vec<String>> {
    let path = format!("{}/../../docs/src/{page}.md", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap();
    let marker = format!("<!-- table: {name} -->");
    let (_, rest) = text.split_once(&marker).unwrap_or_else(|| panic!("{page}.md lacks {marker}"));
    let rows =
        rest.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    rows.skip(2)
        .map(|row| row.trim_matches('|').split(" | ").map(|cell| cell.trim().replace('`', "")).collect())
        .collect()
}

/// Compares the first cells of a table's rows, and shows all that should stand there when they differ.
fn assert_rows(page: &str, name: &str, expected: &[Vec<String>]) {
    let width = expected.first().unwrap().len();
    let found: Vec<Vec<String>> =
        table(page, name).into_iter().map(|row| row.into_iter().take(width).collect()).collect();
    if found != expected {
        let rows: Vec<String> = expected.iter().map(|row| format!("| {} |", row.join(" | "))).collect();
        let wrong: Vec<_> = expected.iter().filter(|row| !found.contains(row)).collect();
        panic!(
            "the table {name} of {page}.md should begin its rows so:\n{}\nwrong: {wrong:?}",
            rows.join("\n")
        );
    }
}

/// A default as the tables show it: text without quotes, and `none` for what is not set.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) if text.is_empty() => "empty".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) if items.is_empty() => "empty".to_owned(),
        Value::Array(items) => items.iter().map(shown).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

/// Key and default of each key of a configuration, by name; those left out that hold a configuration of their own.
fn keys_and_defaults(config: &impl Serialize) -> Vec<Vec<String>> {
    let Value::Object(map) = serde_json::to_value(config).unwrap() else { panic!("not a map") };
    let mut rows: Vec<_> = map
        .iter()
        .filter(|(_, value)| !value.is_object())
        .map(|(key, value)| vec![key.clone(), shown(value)])
        .collect();
    rows.sort();
    rows
}

#[test]
fn the_keys_of_the_connector_are_those_of_the_code() {
    let Value::Object(defaults) = serde_json::to_value(ConnectorConfig::default()).unwrap() else { panic!() };
    let accepted = |key: &str| {
        // No key takes an object: the refusal says what it does take.
        let bad: Map<String, Value> = [(key.to_owned(), json!({}))].into_iter().collect();
        let error = ConnectorConfig::try_from(bad).unwrap_err();
        error.message().split_once("accepted: ").unwrap().1.to_owned()
    };
    let rows: Vec<_> = ConnectorConfig::KEYS
        .iter()
        .map(|key| vec![(*key).to_owned(), shown(&defaults[*key]), accepted(key)])
        .collect();
    assert_rows("connector", "connector keys", &rows);
}

#[test]
fn every_error_stands_in_the_table_with_its_code_and_whether_to_try_again() {
    let rows: Vec<_> = ErrorKind::ALL
        .iter()
        .map(|kind| {
            let again = if kind.retryable() { "yes" } else { "no" };
            vec![kind.name().to_owned(), kind.code().to_string(), again.to_owned()]
        })
        .collect();
    assert_rows("connector", "errors", &rows);
}

#[test]
fn the_keys_of_the_engine_are_those_of_the_code() {
    assert_rows("tuning", "engine keys", &keys_and_defaults(&EngineConfig::default()));
}

#[test]
fn the_keys_of_the_handshake_are_those_of_the_code() {
    assert_rows("tuning", "handshake keys", &keys_and_defaults(&EngineConfig::default().handshake));
}

#[test]
fn the_keys_of_tcp_are_those_of_the_code() {
    assert_rows("tuning", "tcp keys", &keys_and_defaults(&TcpConfig::default()));
}

#[test]
fn the_keys_of_shm_are_those_of_the_code() {
    assert_rows("tuning", "shm keys", &keys_and_defaults(&ShmConfig::default()));
}

#[test]
fn the_variables_of_the_environment_are_those_of_the_code() {
    let mut known = EngineConfig::variables().unwrap();
    known.extend(ConnectorConfig::variables());
    let mut parts: Vec<&str> =
        known.iter().map(|name| name[PREFIX.len()..].split('_').next().unwrap()).collect();
    parts.dedup();
    let rows = table("tuning", "environment");
    for row in &rows {
        let key = row[1].to_uppercase();
        assert!(known.contains(&row[0]) && row[0].ends_with(&format!("_{key}")), "{row:?}");
    }
    // The engine's parts come first in the code, the connector's stands first on the page.
    parts.rotate_right(1);
    let shown: Vec<&str> = rows.iter().map(|row| row[0][PREFIX.len()..].split('_').next().unwrap()).collect();
    assert_eq!(shown, parts);
}
