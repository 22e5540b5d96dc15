//! The life of memory that a peer may write to, as a pure state machine.
//!
//! ```text
//! free -> allocated -> granted -> filled -> viewed -> free
//!                         |
//!                         +-> fencing -> free
//! ```
//!
//! A grant ends in one of two ways: the peer reports that everything is in place, or the grant is withdrawn
//! (a deadline, a cancellation, silence). After the second a late write may still be under way, so the slot is
//! nobody's until the memory's owner has fenced the path. No timer leads out of fencing.

use posthorse_core::{Error, ErrorKind, GrantToken, Result};

/// What a peer has to name to write into a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SlotGrant {
    /// The number of this grant: no other grant of the same pool ever has it.
    pub generation: u64,
    /// The token the peer shows with its writes; `None` for peers whose protocol knows no grants.
    pub token: Option<GrantToken>,
}

/// Where a slot stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlotState {
    /// The pool's.
    Free,
    /// Ours alone.
    Allocated,
    /// A peer may write to it; nobody here looks into it.
    Granted(SlotGrant),
    /// The peer has reported that its bytes are visible and that it writes no more.
    Filled,
    /// Handed to the reader.
    Viewed,
    /// Withdrawn from a peer that may still write.
    Fencing(SlotGrant),
}

/// What happens to a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlotEvent {
    /// The pool gave it out.
    Allocate,
    /// A peer was allowed to write.
    Grant(SlotGrant),
    /// A peer reported, under this grant, that all is in place.
    Fill(SlotGrant),
    /// The reader took it.
    View,
    /// The grant was withdrawn before it was used up.
    Withdraw,
    /// Nothing can be written any more under the grant of this generation.
    Fenced {
        /// The grant's generation.
        generation: u64,
    },
    /// It was returned to the pool.
    Release,
}

impl SlotState {
    /// The state after `event`.
    ///
    /// # Errors
    /// The state stays as it is, and the error says why: `AccessDenied` for a report under another grant,
    /// `Expired` for one after the grant has ended, `Busy` for taking a slot that a peer may write to,
    /// `BadFree` for a fence of something else, `InvalidArgument` for what makes no sense in this state.
    pub fn on(self, event: SlotEvent) -> Result<Self> {
        use SlotEvent as E;
        let refuse =
            |kind, why: &str| Err(Error::new(kind, format!("{event:?} of a slot that is {self:?}: {why}")));
        match (self, event) {
            (Self::Free, E::Allocate) => Ok(Self::Allocated),
            (Self::Allocated, E::Grant(grant)) => Ok(Self::Granted(grant)),
            (Self::Granted(grant), E::Fill(reported)) if grant == reported => Ok(Self::Filled),
            (Self::Filled, E::View) => Ok(Self::Viewed),
            (Self::Allocated | Self::Filled | Self::Viewed, E::Release) => Ok(Self::Free),
            (Self::Granted(grant), E::Withdraw) => Ok(Self::Fencing(grant)),
            (Self::Fencing(grant), E::Fenced { generation }) if grant.generation == generation => {
                Ok(Self::Free)
            }

            (Self::Granted(_), E::Fill(_)) => {
                refuse(ErrorKind::AccessDenied, "the report names another grant")
            }
            (_, E::Fill(_)) => refuse(ErrorKind::Expired, "the grant has ended"),
            (_, E::Fenced { .. }) => refuse(ErrorKind::BadFree, "no such grant is being fenced"),
            (Self::Granted(_) | Self::Fencing(_), _) => {
                refuse(ErrorKind::Busy, "a peer may still write to it")
            }
            _ => refuse(
                ErrorKind::InvalidArgument,
                "the states are free, allocated, granted, filled, viewed, free",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn grant(generation: u64, secret: u64) -> SlotGrant {
        SlotGrant { generation, token: Some(GrantToken { handle: 1, secret }) }
    }

    const GRANT: SlotGrant = grant(7, 99);
    const OTHER_TOKEN: SlotGrant = grant(7, 98);
    const OLDER: SlotGrant = grant(6, 99);

    /// Every state against every event: the transitions listed are allowed, all others are refused.
    #[test]
    fn only_the_listed_transitions_exist() {
        use {SlotEvent as E, SlotState as S};
        let states = [S::Free, S::Allocated, S::Granted(GRANT), S::Filled, S::Viewed, S::Fencing(GRANT)];
        let events = [
            E::Allocate,
            E::Grant(GRANT),
            E::Fill(GRANT),
            E::Fill(OTHER_TOKEN),
            E::Fill(OLDER),
            E::View,
            E::Withdraw,
            E::Fenced { generation: 7 },
            E::Fenced { generation: 6 },
            E::Release,
        ];
        let allowed = [
            (S::Free, E::Allocate, S::Allocated),
            (S::Allocated, E::Grant(GRANT), S::Granted(GRANT)),
            (S::Granted(GRANT), E::Fill(GRANT), S::Filled),
            (S::Filled, E::View, S::Viewed),
            (S::Allocated, E::Release, S::Free),
            (S::Filled, E::Release, S::Free),
            (S::Viewed, E::Release, S::Free),
            (S::Granted(GRANT), E::Withdraw, S::Fencing(GRANT)),
            (S::Fencing(GRANT), E::Fenced { generation: 7 }, S::Free),
        ];
        for state in states {
            for event in events {
                let expected = allowed.iter().find(|row| (row.0, row.1) == (state, event)).map(|row| row.2);
                assert_eq!(state.on(event).ok(), expected, "{state:?} {event:?}");
            }
        }
    }

    #[test]
    fn refusals_say_what_kind_of_trouble_it_is() {
        use {SlotEvent as E, SlotState as S};
        for (state, event, kind) in [
            (S::Granted(GRANT), E::Fill(OTHER_TOKEN), ErrorKind::AccessDenied),
            (S::Granted(GRANT), E::Fill(OLDER), ErrorKind::AccessDenied),
            (S::Fencing(GRANT), E::Fill(GRANT), ErrorKind::Expired),
            (S::Free, E::Fill(GRANT), ErrorKind::Expired),
            (S::Granted(GRANT), E::Release, ErrorKind::Busy),
            (S::Fencing(GRANT), E::Release, ErrorKind::Busy),
            (S::Granted(GRANT), E::View, ErrorKind::Busy),
            (S::Fencing(GRANT), E::Fenced { generation: 6 }, ErrorKind::BadFree),
            (S::Free, E::Fenced { generation: 7 }, ErrorKind::BadFree),
            (S::Viewed, E::Grant(GRANT), ErrorKind::InvalidArgument),
        ] {
            assert_eq!(state.on(event).unwrap_err().kind(), kind, "{state:?} {event:?}");
        }
    }
}
