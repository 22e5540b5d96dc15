//! The devices of this host that are used.

use std::sync::Arc;

use posthorse_core::{Error, ErrorKind, Result};

use crate::config::RdmaConfig;
use crate::rail::Rail;
use crate::verbs::Verbs;

/// Opens the devices that the configuration names, or all there are. One that was not named and cannot be opened is left
/// out.
///
/// # Errors
/// `Unsupported` when there is none; `NotFound`, naming those that are there, for one that was named and is not; whatever
/// keeps a named one from being opened.
pub(crate) fn open(verbs: &dyn Verbs, config: &RdmaConfig) -> Result<Vec<Arc<Rail>>> {
    let there = verbs.devices()?;
    let names = if config.devices.is_empty() { &there } else { &config.devices };
    let mut rails: Vec<Arc<Rail>> = Vec::new();
    let mut why = Vec::new();
    for name in names {
        if !there.contains(name) {
            let text = format!("rdma.devices names {name:?}; devices of this host: {}", list(&there));
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        match Rail::open(verbs, name, rails.len(), config) {
            Ok(rail) => rails.push(Arc::new(rail)),
            Err(error) if config.devices.is_empty() => {
                tracing::info!(device = name.as_str(), %error, "a device is left out");
                why.push(error.to_string());
            }
            Err(error) => return Err(error),
        }
    }
    if rails.is_empty() {
        let text = match why.first() {
            Some(first) => format!("no RDMA device can be used; the first: {first}"),
            None => "this host has no RDMA device".to_owned(),
        };
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    Ok(rails)
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::software::Fabric;

    #[test]
    fn those_that_are_named_are_opened_or_all() {
        let fabric = Fabric::new();
        let host = fabric.host(&["soft0", "soft1"]);
        let open_named = |names: &[&str]| {
            let devices = names.iter().map(|name| (*name).to_owned()).collect();
            open(&*host, &RdmaConfig { devices, ..RdmaConfig::default() })
        };
        let names =
            |rails: Vec<Arc<Rail>>| rails.iter().map(|rail| rail.name().to_owned()).collect::<Vec<_>>();
        assert_eq!(names(open_named(&[]).unwrap()), ["soft0", "soft1"]);
        assert_eq!(names(open_named(&["soft1"]).unwrap()), ["soft1"]);
        let error = open_named(&["mlx5_0"]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("soft0, soft1"), "{error}");
        assert_eq!(
            open(&*fabric.host(&[]), &RdmaConfig::default()).unwrap_err().kind(),
            ErrorKind::Unsupported
        );
        fabric.refuse_memory("soft0", true);
        assert_eq!(names(open_named(&[]).unwrap()), ["soft1"], "what cannot be used is left out");
        assert_eq!(open_named(&["soft0"]).unwrap_err().kind(), ErrorKind::LimitReached);
    }
}
