//! NUMA nodes, and binding memory to one.

use std::fs;

use posthorse_core::{Error, Result};

/// The nodes that have memory, ascending, from `/sys/devices/system/node`; node 0 alone where that is absent.
pub fn numa_nodes() -> Vec<u16> {
    ["has_memory", "online"]
        .into_iter()
        .filter_map(|name| fs::read_to_string(format!("/sys/devices/system/node/{name}")).ok())
        .find_map(|text| parse_list(text.trim()).filter(|nodes| !nodes.is_empty()))
        .unwrap_or_else(|| vec![0])
}

/// Refuses a node that is not among `nodes`.
pub(crate) fn check_node(node: u16, nodes: &[u16]) -> Result<()> {
    if nodes.contains(&node) {
        return Ok(());
    }
    let accepted: Vec<_> = nodes.iter().map(u16::to_string).collect();
    Err(Error::invalid_argument(
        "the NUMA node",
        node,
        &format!("the nodes of this host: {}", accepted.join(", ")),
    ))
}

/// Reads the kernel's list format, `0-3,8`; `None` when it is anything else.
fn parse_list(text: &str) -> Option<Vec<u16>> {
    let mut nodes = Vec::new();
    for range in text.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        nodes.extend(first.parse::<u16>().ok()?..=last.parse::<u16>().ok()?);
    }
    nodes.sort_unstable();
    nodes.dedup();
    Some(nodes)
}

/// The mask of `node` alone, as `mbind(2)` wants it: bit `node` of consecutive longs.
pub(crate) fn node_mask(node: u16) -> Vec<libc::c_ulong> {
    let bits = libc::c_ulong::BITS as usize;
    let node = usize::from(node);
    let mut mask = vec![0; node / bits + 1];
    mask[node / bits] = 1 << (node % bits);
    mask
}

#[cfg(test)]
mod tests {
    #[cfg(not(miri))]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_of_the_kernel_are_read() {
        assert_eq!(parse_list("0"), Some(vec![0]));
        assert_eq!(parse_list("0-3,8"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(parse_list(""), Some(vec![]));
        for bad in ["x", "1-", "-1", "0-99999", "1;2"] {
            assert_eq!(parse_list(bad), None, "{bad}");
        }
    }

    #[test]
    fn an_unknown_node_is_refused_with_those_that_exist() {
        check_node(1, &[0, 1]).unwrap();
        let error = check_node(7, &[0, 1]).unwrap_err().to_string();
        assert!(error.contains('7') && error.contains("0, 1"), "{error}");
    }

    #[cfg(not(miri))]
    #[test]
    fn this_host_has_a_node() {
        assert!(!numa_nodes().is_empty());
    }

    // Nothing here is unsafe, so Miri would only be slow.
    #[cfg(not(miri))]
    proptest! {
        #[test]
        fn a_list_is_read_back(nodes in prop::collection::btree_set(0_u16..300, 0..20)) {
            let nodes: Vec<u16> = nodes.into_iter().collect();
            let text: Vec<_> = nodes.iter().map(u16::to_string).collect();
            prop_assert_eq!(parse_list(&text.join(",")), Some(nodes));
        }

        #[test]
        fn a_mask_has_the_one_bit(node in 0_u16..2000) {
            let mask = node_mask(node);
            let bits = libc::c_ulong::BITS;
            let set: Vec<u32> = (0..mask.len() as u32 * bits)
                .filter(|bit| mask[(bit / bits) as usize] >> (bit % bits) & 1 == 1)
                .collect();
            prop_assert_eq!(set, vec![u32::from(node)]);
        }
    }
}
