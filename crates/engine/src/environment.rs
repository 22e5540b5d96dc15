//! The variables of the environment that override the configuration.
//!
//! One rule names them all: `POSTHORSE_PART_KEY`, in capitals, overrides the key of that part of the configuration,
//! whatever a file or the program says. The parts are `CONNECTOR`, `ENGINE`, `HANDSHAKE`, `TCP` and `SHM`; so
//! `POSTHORSE_TCP_LIVENESS_MS=500` overrides the key `liveness_ms` of the transport `tcp`.

use std::collections::BTreeMap;
use std::ffi::OsString;

use posthorse_core::{Error, ErrorKind, Result};
use serde::Serialize;
use serde_json::{Map, Value};

/// What the name of every variable begins with.
pub const PREFIX: &str = "POSTHORSE_";

/// What the names of the variables begin with that override a connector's configuration.
pub const CONNECTOR_PREFIX: &str = "POSTHORSE_CONNECTOR_";

/// Variables with that beginning that are no key's: each is read where it is needed, by the program or its tests.
const OTHERS: &[&str] =
    &["POSTHORSE_CLI_PARENT", "POSTHORSE_HOST_ID", "POSTHORSE_LOG", "POSTHORSE_PYTHON", "POSTHORSE_SKIP_DIR"];

/// The variable that overrides a key.
pub fn variable(part: &str, key: &str) -> String {
    format!("{PREFIX}{part}_{key}").to_uppercase()
}

/// The variables that begin with [`PREFIX`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Environment(BTreeMap<String, OsString>);

impl Environment {
    /// Those that this process has.
    pub fn of_process() -> Self {
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value))).collect()
    }

    /// Puts what the variables of a part say into its configuration.
    ///
    /// `read` makes the configuration of its keys and values and looks at each alone; `accepted` says what a key
    /// takes, where the type of its default does not say enough; `check` looks at all of them together.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the variable, the value and what is accepted.
    pub fn apply<T: Serialize + Default>(
        &self,
        part: &str,
        config: T,
        read: impl Fn(Map<String, Value>) -> Result<T>,
        accepted: impl Fn(&str) -> Option<&'static str>,
        check: impl Fn(&T) -> Result<()>,
    ) -> Result<T> {
        if self.0.is_empty() {
            return Ok(config);
        }
        let defaults = map_of(&T::default())?;
        let mut map = map_of(&config)?;
        let mut applied = Vec::new();
        for (key, default) in defaults {
            let variable = variable(part, &key);
            let Some(text) = self.0.get(&variable) else { continue };
            let with = |value: Value| {
                let mut with = map.clone();
                with.insert(key.clone(), value);
                read(with)
            };
            let values = text.to_str().map_or_else(Vec::new, |text| meanings(text, &default));
            let Some(value) = values.into_iter().find(|value| with(value.clone()).is_ok()) else {
                let shown = text.to_str().unwrap_or("?");
                let accepted = match accepted(&key) {
                    Some(accepted) => {
                        let refusal = with(shown.into()).err();
                        // Of this value, the refusal may know more.
                        let more = refusal.as_ref().and_then(|error| accepted_by(error.message()));
                        more.unwrap_or(accepted).to_owned()
                    }
                    None => in_words(&key, shown, &default, with, &check),
                };
                return Err(Error::invalid_config(&variable, format_args!("{text:?}"), &accepted));
            };
            map.insert(key, value);
            applied.push(variable);
        }
        if applied.is_empty() {
            return Ok(config);
        }
        let config = read(map)?;
        check(&config).map_err(|error| error.context(format_args!("as {} says", applied.join(", "))))?;
        Ok(config)
    }

    /// Says of an error that begins with a key of this part, be it with the part (`part.key`) or not, which variable the
    /// value comes from, if one is set for it.
    #[must_use]
    pub fn named(&self, part: &str, error: Error) -> Error {
        let key = error.message().split_once(" is ").map(|(key, _)| key);
        let variable = key.map(|key| {
            let own = key.strip_prefix(part).and_then(|rest| rest.strip_prefix('.'));
            variable(part, own.unwrap_or(key))
        });
        match variable.filter(|variable| self.0.contains_key(variable)) {
            Some(variable) => error.context(format_args!("as {variable} says")),
            None => error,
        }
    }

    /// The variables that override nothing: those that begin with `prefix` and are not among the `known`.
    pub fn unknown(&self, prefix: &str, known: &[String]) -> Vec<&str> {
        let is_known = |name: &str| OTHERS.contains(&name) || known.iter().any(|known| known == name);
        self.0.keys().map(String::as_str).filter(|name| name.starts_with(prefix) && !is_known(name)).collect()
    }
}

impl<V: Into<OsString>> FromIterator<(String, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (String, V)>>(variables: I) -> Self {
        let ours = variables.into_iter().filter(|(name, _)| name.starts_with(PREFIX));
        Self(ours.map(|(name, value)| (name, value.into())).collect())
    }
}

/// The variables that override the keys of a part.
///
/// # Errors
/// `Internal` for what is not a configuration.
pub fn variables<T: Serialize + Default>(part: &str) -> Result<Vec<String>> {
    Ok(map_of(&T::default())?.keys().map(|key| variable(part, key)).collect())
}

fn map_of(config: &impl Serialize) -> Result<Map<String, Value>> {
    let internal = |what: String| Error::new(ErrorKind::Internal, what);
    match serde_json::to_value(config) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(internal(format!("a configuration is written as {other}, not as keys and values"))),
        Err(error) => Err(internal(format!("a configuration cannot be written: {error}"))),
    }
}

/// What a text may mean for a key with this default, the likeliest first.
fn meanings(text: &str, default: &Value) -> Vec<Value> {
    match default {
        Value::Array(_) => {
            let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
            vec![Value::Array(items.map(Value::from).collect())]
        }
        Value::Null if text.is_empty() => vec![Value::Null],
        _ => {
            let literal = serde_json::from_str(text).ok().filter(|value: &Value| !value.is_null());
            [Value::from(text)].into_iter().chain(literal).collect()
        }
    }
}

/// What is accepted, as a refusal says it: without its kind, which the error that is made of these words has too.
pub fn accepted_by(refusal: &str) -> Option<&str> {
    let (_, words) = refusal.split_once("accepted: ")?;
    words.split(" [").next()
}

/// What a key with this default accepts, in words. Neither type nor check says so by itself; asked with values at the
/// ends of what a type may hold, they do.
fn in_words<T>(
    key: &str,
    text: &str,
    default: &Value,
    with: impl Fn(Value) -> Result<T>,
    check: impl Fn(&T) -> Result<()>,
) -> String {
    let takes = |value: Value| with(value).is_ok();
    let words = match default {
        Value::Bool(_) => "true, false",
        Value::Array(_) if !takes(vec!["text"].into()) && takes(vec!["127.0.0.1"].into()) => {
            "IP addresses separated by commas"
        }
        Value::Array(_) => "values separated by commas",
        _ if takes("text".into()) => "text in UTF-8",
        _ => {
            let largest = [u64::MAX, u32::MAX.into(), u16::MAX.into(), u8::MAX.into()];
            let Some(largest) = largest.into_iter().find(|number| takes((*number).into())) else {
                // It takes certain texts, and may say which.
                let refusal = with(text.into()).err();
                let words = refusal.as_ref().and_then(|error| accepted_by(error.message()));
                return words.unwrap_or("another value").to_owned();
            };
            let refusal = |number: u64| {
                let error = with(number.into()).and_then(|config| check(&config)).err()?;
                let beginning = format!("{key} is {number}; accepted: ");
                error.message().strip_prefix(&beginning).map(str::to_owned)
            };
            return refusal(largest).or_else(|| refusal(0)).unwrap_or_else(|| format!("0 to {largest}"));
        }
    };
    words.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EngineConfig;

    fn environment(variables: &[(&str, &str)]) -> Environment {
        variables.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    /// Another value than this one, as a variable would say it.
    fn another(key: &str, value: &Value) -> String {
        match (key, value) {
            ("transport", _) => "prefer:tcp".to_owned(),
            ("folder", _) => "/run/posthorse".to_owned(),
            ("bind", _) => "127.0.0.1, ::1".to_owned(),
            ("advertise_networks", _) => "10.0.0.0/8,fd00::/8".to_owned(),
            ("default_port", _) => "17".to_owned(),
            ("slice_bytes", _) => "8192".to_owned(),
            // These two are refused alone.
            ("port_min" | "port_max" | "port" | "port_range", _) => "4711".to_owned(),
            (_, Value::Bool(value)) => (!value).to_string(),
            (_, Value::Number(value)) => (value.as_u64().unwrap() + 1).to_string(),
            (_, Value::Array(_)) => "tcp, shm".to_owned(),
            _ => "text".to_owned(),
        }
    }

    #[test]
    fn each_key_of_each_part_is_overridden_by_its_variable_and_by_no_other() {
        let whole = serde_json::to_value(EngineConfig::default()).unwrap();
        let Value::Object(engine) = &whole else { panic!("not a map") };
        let keys = |part: &str, map: &Map<String, Value>| -> Vec<(String, String, Value)> {
            map.iter().map(|(k, v)| (part.to_owned(), k.clone(), v.clone())).collect()
        };
        let nested = ["handshake", "tcp", "shm", "rdma"];
        let mut all: Vec<_> = keys("engine", engine);
        all.retain(|(_, key, _)| !nested.contains(&key.as_str()));
        for part in nested {
            let Some(Value::Object(map)) = engine.get(part) else { continue };
            all.extend(keys(part, map));
        }
        assert!(all.len() > 25, "{all:?}");
        for (part, key, default) in all {
            let name = variable(&part, &key);
            let mut variables = vec![(name.clone(), another(&key, &default))];
            match key.as_str() {
                "port_min" => variables.push((variable(&part, "port_max"), "5000".to_owned())),
                "port_max" => variables.push((variable(&part, "port_min"), "1".to_owned())),
                "port_range" => variables.push((variable(&part, "port"), "1".to_owned())),
                _ => {}
            }
            let also: Vec<_> = variables.iter().map(|(name, _)| name.clone()).collect();
            let changed = EngineConfig::default().overridden_by(&variables.into_iter().collect()).unwrap();
            let changed = serde_json::to_value(changed).unwrap();
            let (before, after) = if part == "engine" {
                (whole.clone(), changed)
            } else {
                (whole[&part].clone(), changed[&part].clone())
            };
            for (other, value) in before.as_object().unwrap() {
                let differs = *value != after[other];
                assert_eq!(
                    differs,
                    also.contains(&variable(&part, other)),
                    "{name}: {other} is {}",
                    after[other]
                );
            }
        }
    }

    #[test]
    fn a_bad_value_is_refused_with_the_variable_the_value_and_what_is_accepted() {
        for (name, value, parts) in [
            ("POSTHORSE_ENGINE_SPIN_US", "fast", ["\"fast\"", "accepted: 0 to"]),
            ("POSTHORSE_ENGINE_TRANSPORT", "tcp", ["\"tcp\"", "require:NAME, such as require:tcp"]),
            ("POSTHORSE_ENGINE_MAX_ATTEMPTS", "-1", ["\"-1\"", "accepted: 1 to 60"]),
            ("POSTHORSE_HANDSHAKE_BIND", "here", ["\"here\"", "accepted: IP addresses separated by commas"]),
            ("POSTHORSE_HANDSHAKE_DEFAULT_PORT", "70000", ["\"70000\"", "accepted: 1 to 65535"]),
            #[cfg(feature = "tcp")]
            ("POSTHORSE_TCP_THREADS", "1e9", ["\"1e9\"", "accepted: 0 to 64"]),
            #[cfg(feature = "tcp")]
            ("POSTHORSE_TCP_PORT", "70000", ["\"70000\"", "accepted: 0 to 65535"]),
            #[cfg(feature = "tcp")]
            ("POSTHORSE_TCP_BIND", "xx", ["\"xx\"", "accepted: IP addresses separated by commas"]),
            #[cfg(feature = "shm")]
            ("POSTHORSE_SHM_LIVENESS_MS", "-1", ["\"-1\"", "accepted: 1 to 3600000"]),
            #[cfg(feature = "tcp")]
            ("POSTHORSE_TCP_LIVENESS_MS", "1", ["liveness_ms is 1", "60 to"]),
            #[cfg(feature = "shm")]
            ("POSTHORSE_SHM_PROCESS_VM", "perhaps", ["\"perhaps\"", "true, false"]),
            #[cfg(feature = "shm")]
            ("POSTHORSE_SHM_LIVENESS_MS", "0", ["liveness_ms is 0", "1 to 3600000"]),
            #[cfg(feature = "shm")]
            ("POSTHORSE_SHM_FOLDER", "x\ny", [r#""x\ny""#, "accepted: an absolute path in UTF-8"]),
        ] {
            let error = EngineConfig::default().overridden_by(&environment(&[(name, value)])).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{name}");
            assert!(error.message().contains(name), "{error}");
            for part in parts {
                assert!(error.message().contains(part), "{part} is missing in {error}");
            }
            assert!(!error.message().contains("InvalidConfig"), "{error}");
        }
    }

    #[test]
    fn an_error_of_a_key_names_the_variable_that_is_set_for_it() {
        let environment = environment(&[("POSTHORSE_SHM_FOLDER", "/x")]);
        for (key, named) in [
            ("folder", true),
            ("shm.folder", true),
            ("tcp.folder", false),
            ("shmfolder", false),
            ("shm.host_id", false),
        ] {
            let error = environment.named("shm", Error::invalid_config(key, "/x", "a folder"));
            let blamed = if named { "as POSTHORSE_SHM_FOLDER says: " } else { "" };
            assert_eq!(error.message(), format!("{blamed}{key} is /x; accepted: a folder"));
        }
    }

    #[test]
    fn variables_that_override_nothing_are_named() {
        let found = environment(&[
            ("POSTHORSE_ENGINE_SPIN_US", "1"),
            ("POSTHORSE_ENGINE_SPIN_MS", "1"),
            ("POSTHORSE_LOG", "warn"),
            ("PATH", "/bin"),
        ]);
        let known = EngineConfig::variables().unwrap();
        assert_eq!(found.unknown(PREFIX, &known), ["POSTHORSE_ENGINE_SPIN_MS"]);
        assert_eq!(found.unknown("POSTHORSE_TCP_", &known), [""; 0]);
    }

    #[test]
    fn a_transport_that_is_left_out_is_not_put_in_by_a_variable() {
        let config = EngineConfig::default();
        #[cfg(feature = "tcp")]
        let config = EngineConfig { tcp: None, ..config };
        let changed = config.clone().overridden_by(&environment(&[("POSTHORSE_TCP_THREADS", "2")])).unwrap();
        assert_eq!(changed, config);
    }
}
