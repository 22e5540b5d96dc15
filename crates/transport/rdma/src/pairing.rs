//! Which of a peer's devices each of ours is connected to: a pure function of their addresses.

use crate::gid::Gid;

/// The pairs to connect, as places in the two lists. Each device is in one at least, on either side. Those whose addresses
/// share the longest prefix come together first: ports of one subnet; among equals, those at the nearest places.
pub(crate) fn pairs(ours: &[Gid], theirs: &[Gid]) -> Vec<(usize, usize)> {
    let mut all: Vec<(usize, usize)> =
        (0..ours.len()).flat_map(|our| (0..theirs.len()).map(move |their| (our, their))).collect();
    let prefix = |&(our, their): &(usize, usize)| {
        ours.get(our).zip(theirs.get(their)).map_or(0, |(our, their)| subnet(*our, *their))
    };
    all.sort_by_key(|pair| (std::cmp::Reverse(prefix(pair)), pair.0.abs_diff(pair.1), *pair));
    let (mut ours_met, mut theirs_met) = (vec![0_u32; ours.len()], vec![0_u32; theirs.len()]);
    let mut chosen = Vec::new();
    // First those of which neither has a partner; then whoever has none takes the best that is least taken.
    for round in 0..2 {
        for &(our, their) in &all {
            let (our_met, their_met) = (ours_met[our], theirs_met[their]);
            let wanted =
                if round == 0 { our_met == 0 && their_met == 0 } else { our_met == 0 || their_met == 0 };
            let least = ours.len().max(theirs.len()).div_ceil(ours.len().min(theirs.len()).max(1)) as u32;
            if wanted && our_met < least && their_met < least {
                ours_met[our] += 1;
                theirs_met[their] += 1;
                chosen.push((our, their));
            }
        }
    }
    chosen.sort_unstable();
    chosen
}

/// How much of their subnet two addresses share. The last byte tells hosts apart, and says nothing.
fn subnet(our: Gid, their: Gid) -> u32 {
    our.common_prefix(their).min(120)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use proptest::prelude::*;

    use super::*;

    fn gid(rail: u16, host: u16) -> Gid {
        Gid(Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0x0a4d, rail << 8 | host).octets())
    }

    #[test]
    fn devices_of_one_subnet_are_paired() {
        let ours = [gid(0, 1), gid(1, 1)];
        assert_eq!(pairs(&ours, &[gid(0, 2), gid(1, 2)]), [(0, 0), (1, 1)]);
        assert_eq!(pairs(&ours, &[gid(1, 2), gid(0, 2)]), [(0, 1), (1, 0)]);
        // All in one: by their places.
        assert_eq!(pairs(&[gid(0, 1), gid(0, 2)], &[gid(0, 3), gid(0, 4)]), [(0, 0), (1, 1)]);
    }

    #[test]
    fn where_one_side_has_more_the_other_has_several_partners() {
        let theirs = [gid(0, 2), gid(1, 2), gid(2, 2), gid(3, 2)];
        let chosen = pairs(&[gid(0, 1), gid(1, 1)], &theirs);
        assert_eq!(chosen.len(), 4, "{chosen:?}");
        assert_eq!(chosen.iter().filter(|(our, _)| *our == 0).count(), 2, "{chosen:?}");
        assert!(chosen.contains(&(0, 0)) && chosen.contains(&(1, 1)));
        assert_eq!(pairs(&[], &theirs), []);
    }

    proptest! {
        #[test]
        fn nobody_is_left_alone(ours in prop::collection::vec(0..5_u16, 1..6), theirs in prop::collection::vec(0..5_u16, 1..6)) {
            let all = |rails: &[u16], host| rails.iter().map(|rail| gid(*rail, host)).collect::<Vec<_>>();
            let chosen = pairs(&all(&ours, 1), &all(&theirs, 2));
            for our in 0..ours.len() {
                prop_assert!(chosen.iter().any(|pair| pair.0 == our), "{:?}", chosen);
            }
            for their in 0..theirs.len() {
                prop_assert!(chosen.iter().any(|pair| pair.1 == their), "{:?}", chosen);
            }
            prop_assert!(chosen.len() <= ours.len() + theirs.len());
        }
    }
}
