//! The registry against a model that is too simple to be wrong.

use crate::regions::region;
use posthorse_core::{Access, Claim, Deadline, ErrorKind, Gate, GrantToken, RegionId};
use posthorse_segment::{Registry, RegistryStats};
use proptest::prelude::*;

const PEERS: [&str; 2] = ["a:1", "b:1"];

#[derive(Debug, Clone)]
enum Step {
    Register { address: u64, len: u64, access: Access },
    Unregister { pick: usize },
    Grant { pick: usize, offset: u64, len: u64, access: Access, peer: Option<usize>, tokenless: bool },
    Revoke { pick: usize },
    Admit { pick: Option<usize>, address: u64, len: u64, access: Access, peer: usize },
    Find { address: u64, len: u64 },
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::None), Just(Access::Read), Just(Access::Write), Just(Access::ReadWrite)]
}

fn wanted() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::Read), Just(Access::Write)]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0_u64..60, 0_u64..20, access()).prop_map(|(address, len, access)| Step::Register { address, len, access }),
        1 => any::<usize>().prop_map(|pick| Step::Unregister { pick }),
        3 => (any::<usize>(), 0_u64..12, 0_u64..12, access(), proptest::option::of(0..2_usize), any::<bool>()).prop_map(
            |(pick, offset, len, access, peer, tokenless)| Step::Grant { pick, offset, len, access, peer, tokenless }
        ),
        1 => any::<usize>().prop_map(|pick| Step::Revoke { pick }),
        6 => (proptest::option::of(any::<usize>()), 0_u64..80, 0_u64..12, wanted(), 0..2_usize)
            .prop_map(|(pick, address, len, access, peer)| Step::Admit { pick, address, len, access, peer }),
        2 => (0_u64..80, 0_u64..20).prop_map(|(address, len)| Step::Find { address, len }),
    ]
}

#[derive(Debug, Default)]
struct Model {
    regions: Vec<(RegionId, u64, u64)>,
    grants: Vec<ModelGrant>,
    /// Every token there ever was, dead ones too.
    tokens: Vec<GrantToken>,
}

#[derive(Debug, Clone)]
struct ModelGrant {
    token: GrantToken,
    region: RegionId,
    address: u64,
    len: u64,
    access: Access,
    peer: Option<&'static str>,
    tokenless: bool,
}

const fn within(outer: u64, outer_len: u64, address: u64, len: u64) -> bool {
    outer <= address && address + len <= outer + outer_len
}

impl ModelGrant {
    fn fits(&self, peer: &str, address: u64, len: u64, access: Access) -> bool {
        self.peer.is_none_or(|only| only == peer)
            && self.access.allows(access)
            && within(self.address, self.len, address, len)
    }
}

fn pick<T>(list: &[T], pick: usize) -> Option<&T> {
    list.get(pick.checked_rem(list.len())?)
}

impl Model {
    fn remember(&mut self, grant: ModelGrant) {
        assert!(!self.tokens.iter().any(|token| token.handle == grant.token.handle), "a handle came twice");
        self.tokens.push(grant.token);
        self.grants.push(grant);
    }

    fn apply(&mut self, registry: &Registry, step: &Step) {
        match *step {
            Step::Register { address, len, access } => {
                let overlaps = self
                    .regions
                    .iter()
                    .any(|(_, start, bytes)| address < start + bytes && *start < address + len);
                match registry.register(region(address, len), access) {
                    Ok(registered) => {
                        assert!(len > 0 && !overlaps);
                        let id = registered.id;
                        self.regions.push((id, address, len));
                        let standing = registry.standing_grant(id).unwrap();
                        assert_eq!(standing.is_some(), access != Access::None);
                        if let Some(grant) = standing {
                            let token = grant.token;
                            let grant = ModelGrant {
                                token,
                                region: id,
                                address,
                                len,
                                access,
                                peer: None,
                                tokenless: true,
                            };
                            self.remember(grant);
                        }
                    }
                    Err(error) if len == 0 => assert_eq!(error.kind(), ErrorKind::InvalidArgument),
                    Err(error) => assert!(overlaps && error.kind() == ErrorKind::Overlap, "{error}"),
                }
            }
            Step::Unregister { pick: which } => {
                let Some((id, ..)) = pick(&self.regions, which).copied() else { return };
                registry.unregister(id, Deadline::NEVER).unwrap();
                self.regions.retain(|(other, ..)| *other != id);
                self.grants.retain(|grant| grant.region != id);
                assert_eq!(registry.pin(id).unwrap_err().kind(), ErrorKind::NotRegistered);
            }
            Step::Grant { pick: which, offset, len, access, peer, tokenless } => {
                let Some((id, address, bytes)) = pick(&self.regions, which).copied() else { return };
                let peer = peer.map(|peer| PEERS[peer]);
                let made = if tokenless {
                    registry.grant_tokenless(id, offset, len, access, peer)
                } else {
                    registry.grant(id, offset, len, access, peer)
                };
                let acceptable = len > 0 && access != Access::None && offset + len <= bytes;
                assert_eq!(made.is_ok(), acceptable, "{made:?}");
                if let Ok(made) = made {
                    let (token, address) = (made.token, address + offset);
                    self.remember(ModelGrant { token, region: id, address, len, access, peer, tokenless });
                }
            }
            Step::Revoke { pick: which } => {
                let Some(token) = pick(&self.tokens, which).copied() else { return };
                let alive = self.grants.iter().any(|grant| grant.token == token);
                assert_eq!(registry.revoke(token, Deadline::NEVER).is_ok(), alive);
                self.grants.retain(|grant| grant.token != token);
            }
            Step::Admit { pick: which, address, len, access, peer } => {
                let token = which.and_then(|which| pick(&self.tokens, which).copied());
                let peer = PEERS[peer];
                let admitted = registry.admit(&Claim { peer, token, address, len, access });
                // Without a token an empty range at a region's very end belongs to whatever follows, if anything.
                let there = self
                    .regions
                    .iter()
                    .find(|(_, start, bytes)| *start <= address && address < start + bytes);
                let region = there.map(|(id, ..)| *id);
                let mut candidates = self.grants.iter().filter(|grant| match token {
                    Some(token) => grant.token == token,
                    None => grant.tokenless && Some(grant.region) == region,
                });
                let expected = candidates.any(|grant| grant.fits(peer, address, len, access));
                assert_eq!(admitted.is_ok(), expected, "{admitted:?}");
                if let Ok(admission) = admitted {
                    assert_eq!((admission.view().address(), admission.view().len()), (address, len));
                    assert!(admission.enter().is_some());
                }
            }
            Step::Find { address, len } => {
                let expected = self
                    .regions
                    .iter()
                    .find(|(_, start, bytes)| address < start + bytes && within(*start, *bytes, address, len))
                    .map(|(id, start, _)| (*id, address - start));
                assert_eq!(registry.find(address, len), expected);
            }
        }
    }

    fn check(&self, registry: &Registry) {
        let stats = RegistryStats { regions: self.regions.len(), grants: self.grants.len(), fencing: 0 };
        assert_eq!(registry.stats(), stats);
    }
}

proptest! {
    #[test]
    fn any_sequence_of_calls_has_the_outcomes_of_the_model(steps in proptest::collection::vec(step(), 1..120)) {
        let registry = Registry::new();
        let mut model = Model::default();
        for step in &steps {
            model.apply(&registry, step);
            model.check(&registry);
        }
    }
}
