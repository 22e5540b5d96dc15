//! What is said of each transfer.

use serde::{Deserialize, Serialize};

use super::pair::{Mode, Transfer};
use crate::{table, units};

/// One transfer, as `--json` writes it. GB = 1e9 bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) mode: Mode,
    /// What really carried it.
    pub(crate) transport: String,
    /// Bytes of the tensors.
    pub(crate) bytes: u64,
    /// Their number.
    pub(crate) tensors: u64,
    /// Of the payload in order, computed by the consumer.
    pub(crate) sha256: String,
    pub(crate) put_ms: f64,
    pub(crate) get_ms: f64,
    /// Bytes over put and get.
    pub(crate) gb_per_s: f64,
    /// Whether the consumer has every byte that the producer has, under the right names.
    pub(crate) verified: bool,
}

impl Record {
    /// What there is to say of a transfer.
    pub(crate) fn of(transfer: &Transfer) -> Self {
        let Transfer { mode, got, put_ms, verified, .. } = transfer;
        Self {
            mode: *mode,
            transport: got.transport.clone(),
            bytes: got.bytes,
            tensors: got.tensors,
            sha256: got.sha256.clone().unwrap_or_default(),
            put_ms: units::significant(*put_ms),
            get_ms: units::significant(got.get_ms),
            gb_per_s: units::significant(gb_per_s(got.bytes, put_ms + got.get_ms)),
            verified: *verified,
        }
    }
}

/// Bytes over milliseconds.
fn gb_per_s(bytes: u64, ms: f64) -> f64 {
    if ms > 0.0 { bytes as f64 / 1e6 / ms } else { 0.0 }
}

/// The columns of the table.
const HEAD: [&str; 10] =
    ["mode", "transport", "size", "tensors", "transfers", "put ms", "get ms", "GB/s", "best", "verified"];

/// A line for each mode: the medians of its transfers, and the fastest.
pub(crate) fn render(records: &[Record]) -> String {
    let mut modes: Vec<Mode> = Vec::new();
    for record in records {
        if !modes.contains(&record.mode) {
            modes.push(record.mode);
        }
    }
    let rows: Vec<Vec<String>> = modes
        .into_iter()
        .filter_map(|mode| {
            let of_mode: Vec<&Record> = records.iter().filter(|record| record.mode == mode).collect();
            let first = of_mode.first()?;
            let verified = of_mode.iter().filter(|record| record.verified).count();
            let best = of_mode.iter().map(|record| record.gb_per_s).fold(0.0, f64::max);
            Some(vec![
                mode.name().to_owned(),
                first.transport.clone(),
                units::rounded_size(first.bytes),
                first.tensors.to_string(),
                of_mode.len().to_string(),
                format!("{:.3}", median(&of_mode, |record| record.put_ms)),
                format!("{:.3}", median(&of_mode, |record| record.get_ms)),
                format!("{:.2}", median(&of_mode, |record| record.gb_per_s)),
                format!("{best:.2}"),
                if verified == of_mode.len() { "yes".to_owned() } else { format!("{verified} only") },
            ])
        })
        .collect();
    table::render(&HEAD, &rows)
}

fn median(records: &[&Record], value: impl Fn(&Record) -> f64) -> f64 {
    let mut values: Vec<f64> = records.iter().map(|record| value(record)).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(mode: Mode, get_ms: f64, verified: bool) -> Record {
        Record {
            mode,
            transport: "shm".into(),
            bytes: 57_344,
            tensors: 56,
            sha256: "00".repeat(32),
            put_ms: 0.5,
            get_ms,
            gb_per_s: gb_per_s(57_344, 0.5 + get_ms),
            verified,
        }
    }

    #[test]
    fn the_fields_are_those_of_the_specification_in_its_order() {
        let text = serde_json::to_string(&record(Mode::ZeroCopy, 1.0, true)).unwrap();
        let fields =
            ["mode", "transport", "bytes", "tensors", "sha256", "put_ms", "get_ms", "gb_per_s", "verified"];
        let mut rest = text.as_str();
        for field in fields {
            let at = rest.find(&format!("\"{field}\":")).unwrap_or_else(|| panic!("{field} in {text}"));
            rest = &rest[at..];
        }
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value.as_object().unwrap().len(), fields.len());
        assert_eq!(value["mode"], "zero_copy");
        assert!((value["gb_per_s"].as_f64().unwrap() - 57_344.0 / 1.5e6).abs() < 1e-9);
    }

    #[test]
    fn the_book_explains_each_mode_and_each_column_that_needs_it() {
        let page = include_str!("../../../../docs/src/measuring.md");
        let (demo, _) = page.split_once("## The benches").unwrap();
        let plain = ["mode", "transport", "size", "tensors", "transfers"];
        let columns = HEAD.into_iter().filter(|column| !plain.contains(column));
        for word in Mode::ALL.iter().map(|mode| mode.name()).chain(columns) {
            assert!(demo.contains(&format!("`{word}`")), "{word}");
        }
    }

    #[test]
    fn the_table_has_a_line_for_each_mode_and_hides_no_failure() {
        let records = [
            record(Mode::Copy, 1.0, true),
            record(Mode::Copy, 3.0, false),
            record(Mode::Copy, 2.0, true),
            record(Mode::Object, 1.0, true),
        ];
        let text = render(&records);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(
            lines[2].starts_with("copy") && lines[2].contains("2.000") && lines[2].ends_with("2 only"),
            "{text}"
        );
        assert!(lines[3].starts_with("object") && lines[3].ends_with("yes"), "{text}");
    }
}
