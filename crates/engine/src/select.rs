//! Which path a request takes: a pure function of the request's route and what is known of the peer.

use posthorse_core::{Route, TransportId};

/// What is known of one installed transport towards one peer, in the engine's order of preference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) transport: TransportId,
    pub(crate) reach: Reach,
}

/// How a transport reaches a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It has paths that are up: each path's index, and the bytes under way on it.
    Up(Vec<(usize, u64)>),
    /// It was not tried yet, or failed long enough ago to be tried again.
    Worth,
    /// It cannot be had now.
    Out,
}

/// What to do with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Send it along the path of this index.
    Use(usize),
    /// Connect this transport first.
    Connect(TransportId),
    /// There is no way.
    None,
}

/// Chooses a path. Of a transport's several paths, the one with the least under way.
pub(crate) fn choose(route: Route, candidates: &[Candidate]) -> Choice {
    let first = match route {
        Route::Auto => None,
        Route::Prefer(transport) | Route::Require(transport) => Some(transport),
    };
    let named = candidates.iter().filter(|candidate| Some(candidate.transport) == first);
    let others = candidates
        .iter()
        .filter(|candidate| Some(candidate.transport) != first && !matches!(route, Route::Require(_)));
    for Candidate { transport, reach } in named.chain(others) {
        match reach {
            Reach::Up(paths) => {
                if let Some((index, _)) = paths.iter().min_by_key(|(_, under_way)| *under_way) {
                    return Choice::Use(*index);
                }
            }
            Reach::Worth => return Choice::Connect(*transport),
            Reach::Out => {}
        }
    }
    Choice::None
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHM: TransportId = TransportId(0);
    const TCP: TransportId = TransportId(1);

    fn candidates(shm: Reach, tcp: Reach) -> [Candidate; 2] {
        [Candidate { transport: SHM, reach: shm }, Candidate { transport: TCP, reach: tcp }]
    }

    #[test]
    fn the_table_of_choices() {
        use Choice::{Connect, None, Use};
        use Reach::{Out, Up, Worth};
        use Route::{Auto, Prefer, Require};
        let up = |index| Up(vec![(index, 0)]);
        for (route, shm, tcp, choice) in [
            (Auto, up(0), up(1), Use(0)),
            (Auto, Worth, up(1), Connect(SHM)),
            (Auto, Out, up(1), Use(1)),
            (Auto, Out, Worth, Connect(TCP)),
            (Auto, Out, Out, None),
            (Prefer(TCP), up(0), up(1), Use(1)),
            (Prefer(TCP), up(0), Worth, Connect(TCP)),
            (Prefer(TCP), up(0), Out, Use(0)),
            (Require(TCP), up(0), up(1), Use(1)),
            (Require(TCP), up(0), Worth, Connect(TCP)),
            (Require(TCP), up(0), Out, None),
            (Require(TransportId(9)), up(0), up(1), None),
        ] {
            let known = candidates(shm, tcp);
            assert_eq!(choose(route, &known), choice, "{route:?} {known:?}");
        }
    }

    #[test]
    fn of_several_rails_the_one_with_the_least_under_way_is_taken() {
        let known = candidates(Reach::Out, Reach::Up(vec![(3, 500), (4, 20), (5, 400)]));
        assert_eq!(choose(Route::Auto, &known), Choice::Use(4));
    }
}
