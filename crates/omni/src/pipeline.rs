//! The edges of a pipeline and their connectors, as vLLM-Omni writes them.
//!
//! Both shapes of its files are read: the older one (`runtime.connectors`, `runtime.edges`, `stage_args`) and the
//! newer one (`connectors`, `edges`, `stages`). `${NAME}` in a text stands for an environment variable, which has
//! to be set; a text that is nothing else becomes a number or truth value where it reads as one.
//!
//! Each end of an edge may name a connector with its own settings, and each end then gets its own: that is how two
//! hosts differ. What both ends have to share (protocol, fingerprint) must not differ. Where only one end names a
//! connector, the other end gets the same settings, except for the address.

use std::collections::{BTreeMap, BTreeSet};

use posthorse_core::{Error, ErrorKind, Result};
use serde_json::{Map, Value};

use crate::config::{ConnectorConfig, Role};
use crate::key::Edge;

/// The connectors that a [`ConnectorConfig`] describes: Posthorse's own, and the one it is interoperable with.
pub const CONNECTOR_NAMES: [&str; 2] = ["PosthorseConnector", "MooncakeTransferEngineConnector"];

/// The settings that both ends of an edge have to share.
const SHARED_KEYS: [&str; 2] = ["protocol", "fingerprint"];

/// The settings that belong to one end alone, so that the other does not inherit them.
const LOCAL_KEYS: [&str; 5] = ["host", "zmq_port", "advertise_host", "device_name", "role"];

/// The edges of a pipeline.
#[derive(Debug, Clone, PartialEq)]
pub struct Pipeline {
    edges: BTreeMap<Edge, Ends>,
}

#[derive(Debug, Clone, PartialEq)]
struct Ends {
    sender: ConnectorConfig,
    receiver: ConnectorConfig,
}

/// The connectors of one stage.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StageConnectors {
    /// Those by which it pulls, each with the stage it pulls from.
    pub incoming: Vec<(String, ConnectorConfig)>,
    /// Those by which it offers, each with the stage it offers to.
    pub outgoing: Vec<(String, ConnectorConfig)>,
}

impl Pipeline {
    /// Reads a pipeline from YAML or JSON, with variables of the environment.
    ///
    /// # Errors
    /// As [`Pipeline::from_yaml_with`].
    pub fn from_yaml(text: &str) -> Result<Self> {
        Self::from_yaml_with(text, &|name| std::env::var(name).ok())
    }

    /// Reads a pipeline from YAML or JSON, with variables by `lookup`.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the place, for text that is no YAML, a variable that is not set, a reference to a
    /// connector that is not defined, a connector of another kind than [`CONNECTOR_NAMES`], ends of an edge that
    /// name different connectors or differ in what they have to share, an unknown key or bad value of a connector.
    pub fn from_yaml_with(text: &str, lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let mut value: Value = serde_saphyr::from_str(text)
            .map_err(|e| invalid(format!("the pipeline is not valid YAML: {e}")))?;
        expand(&mut value, "", lookup)?;
        Self::from_value(&value)
    }

    /// Reads a pipeline from a tree of either shape, without variables.
    ///
    /// # Errors
    /// As [`Pipeline::from_yaml_with`].
    pub fn from_value(value: &Value) -> Result<Self> {
        let root = object(value, "the pipeline")?;
        // The older shape keeps connectors and edges under `runtime`, and its stages elsewhere.
        let nothing = Value::Null;
        let runtime = root.get("runtime").unwrap_or(&nothing);
        let section = |name: &str| root.get(name).or_else(|| runtime.get(name)).filter(|v| !v.is_null());
        let stages = match root.get("stage_args").or_else(|| root.get("stages")) {
            Some(stages) => list(stages, "stages")?,
            None => return Err(invalid("the pipeline has neither stages nor stage_args".to_owned())),
        };
        let defined = match section("connectors") {
            Some(connectors) => object(connectors, "connectors")?,
            None => &Map::new(),
        };
        let mut named: BTreeMap<Edge, [Option<Spec>; 2]> = BTreeMap::new();
        let mut known = BTreeSet::new();
        for stage in stages {
            let id = text_of(stage.get("stage_id"))
                .ok_or_else(|| invalid("a stage has no stage_id".to_owned()))?;
            if !known.insert(id.clone()) {
                return Err(invalid(format!("stage_id {id} stands twice")));
            }
            for (key, prefix, end) in
                [("output_connectors", "to_stage_", 0), ("input_connectors", "from_stage_", 1)]
            {
                let Some(connectors) = stage.get(key).filter(|v| !v.is_null()) else { continue };
                let place = format!("{key} of stage {id}");
                for (far, connector) in object(connectors, &place)? {
                    let Some(far) = far.strip_prefix(prefix).filter(|far| !far.is_empty()) else {
                        return Err(invalid(format!("{place} has the key {far:?}; accepted: {prefix}N")));
                    };
                    let edge = if end == 0 { Edge::new(&id, far) } else { Edge::new(far, &id) };
                    let spec = Spec::of(connector, defined, &format!("{place}, {prefix}{far}"))?;
                    named.entry(edge).or_default()[end] = Some(spec);
                }
            }
            if let Some(sources) = stage.get("engine_input_source").filter(|v| !v.is_null()) {
                for source in list(sources, &format!("engine_input_source of stage {id}"))? {
                    let source = text_of(Some(source))
                        .ok_or_else(|| invalid(format!("engine_input_source of stage {id} has {source}")))?;
                    named.entry(Edge::new(source, &id)).or_default();
                }
            }
        }
        if let Some(edges) = section("edges") {
            for edge in list(edges, "edges")? {
                let (Some(from), Some(to)) = (text_of(edge.get("from")), text_of(edge.get("to"))) else {
                    return Err(invalid(format!("the edge {edge} has no from or no to")));
                };
                named.entry(Edge::new(from, to)).or_default();
            }
        }
        let edges = named.into_iter().map(|(edge, specs)| {
            edge.check().map_err(|error| invalid(format!("the edge {edge}: {}", error.message())))?;
            for stage in [&edge.from, &edge.to] {
                if !known.contains(stage) {
                    return Err(invalid(format!(
                        "the edge {edge} names stage {stage}, which is not defined"
                    )));
                }
            }
            let ends = Ends::of(&edge, specs)?;
            Ok((edge, ends))
        });
        Ok(Self { edges: edges.collect::<Result<_>>()? })
    }

    /// The edges, in order.
    pub fn edges(&self) -> impl Iterator<Item = &Edge> {
        self.edges.keys()
    }

    /// The sender's and the receiver's configuration of an edge.
    pub fn edge(&self, edge: &Edge) -> Option<(&ConnectorConfig, &ConnectorConfig)> {
        self.edges.get(edge).map(|ends| (&ends.sender, &ends.receiver))
    }

    /// The connectors of a stage, roles included. A stage in the middle has both incoming and outgoing ones.
    pub fn stage(&self, stage: &str) -> StageConnectors {
        let mut connectors = StageConnectors::default();
        for (edge, ends) in &self.edges {
            if edge.to == stage {
                connectors.incoming.push((edge.from.clone(), ends.receiver.clone()));
            }
            if edge.from == stage {
                connectors.outgoing.push((edge.to.clone(), ends.sender.clone()));
            }
        }
        connectors
    }
}

/// A connector as a file describes it.
#[derive(Debug, Clone, PartialEq)]
struct Spec {
    name: String,
    extra: Map<String, Value>,
}

impl Spec {
    fn of(value: &Value, defined: &Map<String, Value>, place: &str) -> Result<Self> {
        let value = match value {
            Value::String(reference) => defined.get(reference).ok_or_else(|| {
                let names: Vec<&str> = defined.keys().map(String::as_str).collect();
                let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                invalid(format!("{place} refers to the connector {reference:?}; defined: {names}"))
            })?,
            inline => inline,
        };
        let spec = object(value, place)?;
        if let Some(key) = spec.keys().find(|key| !matches!(key.as_str(), "name" | "extra")) {
            return Err(invalid(format!(
                "the connector of {place} has the key {key:?}; accepted: name, extra"
            )));
        }
        let name = match spec.get("name").and_then(Value::as_str) {
            Some(name) if CONNECTOR_NAMES.contains(&name) => name.to_owned(),
            other => {
                let other = other.unwrap_or_default();
                let accepted = CONNECTOR_NAMES.join(", ");
                return Err(invalid(format!(
                    "the connector of {place} is named {other:?}; accepted: {accepted}"
                )));
            }
        };
        let extra = match spec.get("extra").filter(|v| !v.is_null()) {
            Some(extra) => object(extra, &format!("extra of {place}"))?.clone(),
            None => Map::new(),
        };
        Ok(Self { name, extra })
    }
}

impl Ends {
    fn of(edge: &Edge, [sender, receiver]: [Option<Spec>; 2]) -> Result<Self> {
        if let (Some(sender), Some(receiver)) = (&sender, &receiver) {
            if sender.name != receiver.name {
                let (a, b) = (&sender.name, &receiver.name);
                return Err(invalid(format!(
                    "the ends of the edge {edge} name different connectors: {a} and {b}"
                )));
            }
            for key in SHARED_KEYS {
                let (a, b) = (sender.extra.get(key), receiver.extra.get(key));
                if let (Some(a), Some(b)) = (a, b)
                    && a != b
                {
                    return Err(invalid(format!("the ends of the edge {edge} differ in {key}: {a} and {b}")));
                }
            }
        }
        let inherited = |spec: &Option<Spec>| {
            let mut extra = spec.as_ref().map_or_else(Map::new, |spec| spec.extra.clone());
            LOCAL_KEYS.iter().for_each(|key| drop(extra.remove(*key)));
            extra
        };
        let end = |own: &Option<Spec>, other: &Option<Spec>, role: Role| {
            let extra = own.as_ref().map_or_else(|| inherited(other), |spec| spec.extra.clone());
            let explicit = extra.contains_key("role");
            let mut config =
                ConnectorConfig::try_from(extra).map_err(|e| e.context(format!("the edge {edge}")))?;
            if !explicit {
                config.role = role;
            }
            Ok(config)
        };
        Ok(Self {
            sender: end(&sender, &receiver, Role::Sender)?,
            receiver: end(&receiver, &sender, Role::Receiver)?,
        })
    }
}

/// Replaces every `${NAME}` in every text of a tree.
fn expand(value: &mut Value, place: &str, lookup: &dyn Fn(&str) -> Option<String>) -> Result<()> {
    match value {
        Value::Object(map) => {
            map.iter_mut().try_for_each(|(key, value)| expand(value, &format!("{place}.{key}"), lookup))
        }
        Value::Array(items) => items
            .iter_mut()
            .enumerate()
            .try_for_each(|(i, item)| expand(item, &format!("{place}[{i}]"), lookup)),
        Value::String(text) if text.contains("${") => {
            let whole = text.starts_with("${") && text.find('}') == Some(text.len() - 1);
            let expanded = expand_text(text, place.trim_start_matches('.'), lookup)?;
            let scalar =
                serde_json::from_str::<Value>(&expanded).ok().filter(|v| v.is_number() || v.is_boolean());
            *value = scalar.filter(|_| whole).unwrap_or(Value::String(expanded));
            Ok(())
        }
        _ => Ok(()),
    }
}

fn expand_text(text: &str, place: &str, lookup: &dyn Fn(&str) -> Option<String>) -> Result<String> {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("${") {
        let (name, behind) = after
            .split_once('}')
            .ok_or_else(|| invalid(format!("{place} has \"${{\" without its end in {text:?}")))?;
        let value = lookup(name).ok_or_else(|| {
            invalid(format!("{place} needs the environment variable {name:?}, which is not set"))
        })?;
        out.push_str(before);
        out.push_str(&value);
        rest = behind;
    }
    out.push_str(rest);
    Ok(out)
}

/// A stage's name, written as a number or a text.
fn text_of(value: Option<&Value>) -> Option<String> {
    match value? {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

fn object<'a>(value: &'a Value, place: &str) -> Result<&'a Map<String, Value>> {
    value.as_object().ok_or_else(|| invalid(format!("{place} is {value}; accepted: a map")))
}

fn list<'a>(value: &'a Value, place: &str) -> Result<&'a [Value]> {
    value
        .as_array()
        .map(Vec::as_slice)
        .ok_or_else(|| invalid(format!("{place} is {value}; accepted: a list")))
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidConfig, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Pipeline> {
        Pipeline::from_yaml_with(text, &|name| match name {
            "PORT" => Some("50200".to_owned()),
            "HOST" => Some("10.0.0.9".to_owned()),
            _ => None,
        })
    }

    const TWO_STAGES: &str = "
connectors:
  net: {name: PosthorseConnector, extra: {host: 10.0.0.1, protocol: tcp, memory_pool_size: 8192}}
stages:
  - stage_id: 0
    output_connectors: {to_stage_1: net}
  - stage_id: 1
";

    #[test]
    fn roles_are_injected_and_the_other_end_inherits_all_but_the_address() {
        let pipeline = read(TWO_STAGES).unwrap();
        let (sender, receiver) = pipeline.edge(&Edge::new(0, 1)).unwrap();
        assert_eq!((sender.role, receiver.role), (Role::Sender, Role::Receiver));
        assert_eq!((&*sender.host, &*receiver.host), ("10.0.0.1", "auto"));
        assert_eq!((sender.memory_pool_size, receiver.memory_pool_size), (8192, 8192));
    }

    #[test]
    fn both_shapes_say_the_same() {
        let older = "
runtime:
  connectors:
    net: {name: PosthorseConnector, extra: {host: 10.0.0.1, protocol: tcp, memory_pool_size: 8192}}
  edges: [{from: 0, to: 1}]
stage_args:
  - {stage_id: 0, output_connectors: {to_stage_1: net}}
  - {stage_id: 1, engine_input_source: [0]}
";
        assert_eq!(read(older).unwrap(), read(TWO_STAGES).unwrap());
    }

    #[test]
    fn an_edge_without_a_connector_gets_the_default_and_a_middle_stage_has_both_directions() {
        let text = "{stages: [{stage_id: 0}, {stage_id: 1, engine_input_source: [0]}, {stage_id: 2}], edges: [{from: 1, to: 2}]}";
        let pipeline = read(text).unwrap();
        let middle = pipeline.stage("1");
        assert_eq!((middle.incoming.len(), middle.outgoing.len()), (1, 1));
        assert_eq!(middle.incoming[0].1.role, Role::Receiver);
        assert_eq!(
            middle.outgoing[0],
            ("2".to_owned(), ConnectorConfig { role: Role::Sender, ..Default::default() })
        );
        assert_eq!(pipeline.edges().count(), 2);
    }

    #[test]
    fn variables_are_expanded_and_have_to_be_set() {
        let text = |port: &str| {
            TWO_STAGES.replace("host: 10.0.0.1", &format!("host: \"${{HOST}}\", zmq_port: \"{port}\""))
        };
        let pipeline = read(&text("${PORT}")).unwrap();
        assert_eq!(pipeline.stage("0").outgoing[0].1.bind_address().unwrap(), "10.0.0.9:50200");
        for (port, part) in [("${NO}", "\"NO\", which is not set"), ("${PORT", "without its end")] {
            let error = read(&text(port)).unwrap_err();
            assert!(error.message().contains(part), "{part} is missing in {error}");
            assert!(error.message().contains("connectors.net.extra.zmq_port"), "{error}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        let two = |sender: &str, receiver: &str| {
            format!(
                "{{connectors: {{a: {{name: PosthorseConnector, extra: {{protocol: tcp}}}}}},
                 stages: [{{stage_id: 0, output_connectors: {{to_stage_1: {sender}}}}},
                          {{stage_id: 1, input_connectors: {{from_stage_0: {receiver}}}}}]}}"
            )
        };
        let mooncake = "{name: MooncakeTransferEngineConnector}";
        for (text, parts) in [
            (two("a", "b"), ["from_stage_0 refers to the connector \"b\"", "defined: a"]),
            (two("a", mooncake), ["0->1", "PosthorseConnector and MooncakeTransferEngineConnector"]),
            (
                two("a", "{name: PosthorseConnector, extra: {protocol: rdma}}"),
                ["0->1 differ in protocol", "\"tcp\" and \"rdma\""],
            ),
            (two("a", "{name: PosthorseConnector, extra: {pool: 1}}"), ["0->1", "\"pool\""]),
            (two("a", "{name: Carrier}"), ["\"Carrier\"", "PosthorseConnector"]),
            (two("a", "{name: PosthorseConnector, extras: 1}"), ["\"extras\"", "name, extra"]),
            (two("a", "7"), ["from_stage_0", "accepted: a map"]),
            (TWO_STAGES.replace("to_stage_1", "stage_1"), ["\"stage_1\"", "to_stage_N"]),
            (TWO_STAGES.replace("to_stage_1", "to_stage_7"), ["0->7", "stage 7"]),
            (TWO_STAGES.replace("stage_id: 1", "stage_id: 0"), ["stage_id 0", "twice"]),
            (
                TWO_STAGES.replace("to_stage_1", "to_stage_1_2").replace("stage_id: 1", "stage_id: \"1_2\""),
                ["0->1_2", "the stage that pulls is \"1_2\"; accepted: a number"],
            ),
            ("{connectors: {}}".to_owned(), ["neither stages", "stage_args"]),
            ("stages: [".to_owned(), ["not valid", "YAML"]),
        ] {
            let error = read(&text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidConfig);
            for part in parts {
                assert!(error.message().contains(part), "{part} is missing in {error}");
            }
        }
    }

    #[test]
    fn the_shipped_examples_are_read() {
        let two = Pipeline::from_yaml(include_str!("../config/two_stages.yaml")).unwrap();
        assert_eq!(two.edges().map(Edge::to_string).collect::<Vec<_>>(), ["0->1"]);
        let three = Pipeline::from_yaml(include_str!("../config/thinker_talker_vocoder.yaml")).unwrap();
        assert_eq!(three.edges().count(), 2);
        assert_eq!(three.stage("1").incoming[0].1.sender_address().unwrap(), "127.0.0.1:50151");
        let older = Pipeline::from_yaml(include_str!("../config/legacy_runtime.yaml")).unwrap();
        assert_eq!(older.edges().count(), 1);
    }
}
