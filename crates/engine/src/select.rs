//! Which path a request takes: a pure function of the request's route and what is known of the peer.

use posthorse_core::{Route, TransportId};

/// How a transport reaches a peer. `P` is a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach<P> {
    /// By this path, the one of its paths that has the least under way.
    Up(P),
    /// It was not tried yet, or is being tried for the first time: worth waiting for.
    New,
    /// It was tried, and failed or went down: to be tried again, and not waited for where there is another way.
    Again,
    /// It cannot be had now.
    Out,
}

/// What to do with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice<P> {
    /// Send it along this path; and try a better transport again meanwhile.
    Use(P, Option<TransportId>),
    /// Connect this transport first.
    Connect(TransportId),
    /// There is no way.
    None,
}

/// Chooses a path, of candidates in the engine's order of preference.
pub(crate) fn choose<P>(
    route: Route,
    candidates: impl Iterator<Item = (TransportId, Reach<P>)> + Clone,
) -> Choice<P> {
    let first = match route {
        Route::Auto => None,
        Route::Prefer(transport) | Route::Require(transport) => Some(transport),
    };
    let named = candidates.clone().filter(|(transport, _)| Some(*transport) == first);
    let others =
        candidates.filter(|(transport, _)| Some(*transport) != first && !matches!(route, Route::Require(_)));
    let mut again = None;
    for (transport, reach) in named.chain(others) {
        match reach {
            Reach::Up(path) => return Choice::Use(path, again),
            Reach::New => return Choice::Connect(again.unwrap_or(transport)),
            Reach::Again => again = again.or(Some(transport)),
            Reach::Out => {}
        }
    }
    again.map_or(Choice::None, Choice::Connect)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHM: TransportId = TransportId(0);
    const TCP: TransportId = TransportId(1);

    #[test]
    fn the_table_of_choices() {
        use Choice::{Connect, None, Use};
        use Reach::{Again, New, Out, Up};
        use Route::{Auto, Prefer, Require};
        for (route, shm, tcp, choice) in [
            (Auto, Up(0), Up(1), Use(0, Option::None)),
            (Auto, New, Up(1), Connect(SHM)),
            (Auto, Again, Up(1), Use(1, Some(SHM))),
            (Auto, Out, Up(1), Use(1, Option::None)),
            (Auto, Again, New, Connect(SHM)),
            (Auto, Again, Again, Connect(SHM)),
            (Auto, Again, Out, Connect(SHM)),
            (Auto, Out, New, Connect(TCP)),
            (Auto, Out, Out, None),
            (Prefer(TCP), Up(0), Up(1), Use(1, Option::None)),
            (Prefer(TCP), Up(0), New, Connect(TCP)),
            (Prefer(TCP), Up(0), Again, Use(0, Some(TCP))),
            (Prefer(TCP), Up(0), Out, Use(0, Option::None)),
            (Require(TCP), Up(0), Up(1), Use(1, Option::None)),
            (Require(TCP), Up(0), Again, Connect(TCP)),
            (Require(TCP), Up(0), Out, None),
            (Require(TransportId(9)), Up(0), Up(1), None),
        ] {
            let known = [(SHM, shm), (TCP, tcp)];
            assert_eq!(choose(route, known.into_iter()), choice, "{route:?} {known:?}");
        }
    }
}
