//! How a producer connects to consumers, apart from its workers.
//!
//! A consumer that can ask and cannot be reached costs as much time as a connection may take. So each consumer without
//! a connection is reached by a thread of its own, which all of its pulls wait for; and one that could not be reached
//! is remembered: its pulls are refused at once for a moment, and later attempts leave room for newcomers, which go
//! first three times out of four. Of these every other turn is the latest one's, so that it waits for one attempt to end
//! and not for all that came before it. Under one name lives one consumer: its lives are reached for one after the other,
//! and where nothing answers under the name, none of them is.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use std::{io, thread};

use parking_lot::Mutex;
use posthorse_core::{AtWork, Deadline, Error, ErrorKind, Incarnation, Result};
use posthorse_engine::Segment;

use super::Inner;
use super::get::closed;
use crate::offer::PullId;

/// The most consumers that are reached for at a time. The others wait for their turn.
const MOST: usize = 64;
/// The most among them that could not be reached before.
const MOST_AGAIN: usize = 16;
/// The most pulls that wait for their consumers to be reached.
const MOST_PULLS: usize = 4096;
/// Of so many turns one is of those that could not be reached before, however many newcomers there are.
const EVERY: u32 = 4;
/// For how long a consumer that could not be reached is not tried again.
const PAUSE: Duration = Duration::from_secs(1);
/// For how long it is known that a consumer could not be reached.
const MEMORY: Duration = Duration::from_secs(60);
/// The most such consumers that are known.
const MOST_KNOWN: usize = 4096;

/// One life of a consumer.
type Life = (Arc<str>, Incarnation);

/// A pull that waits for its consumer to be reached.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) pull: PullId,
    /// Until when it is to be served.
    pub(super) deadline: Deadline,
}

/// The consumers that are being reached, and those that could not be.
#[derive(Debug, Default)]
pub(super) struct Reaching {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    closed: bool,
    waiting: HashMap<Life, Pulls>,
    pulls: usize,
    /// Consumers that have come to wait, ever.
    came: u64,
    /// Whose turn comes, in two lines: those that could not be reached before stand in the second.
    newcomers: VecDeque<Life>,
    again: VecDeque<Life>,
    /// Turns of newcomers since the last of the others.
    in_a_row: u32,
    /// Whether the next turn of newcomers is the latest one's.
    latest: bool,
    /// The names of the consumers that threads are at.
    names: HashSet<Arc<str>>,
    /// Consumers that threads are at, and how many of them are such as above.
    under_way: usize,
    again_under_way: usize,
    failed: HashMap<Life, (Instant, Error)>,
}

/// The pulls of a consumer, and which of all that came it was.
#[derive(Debug, Default)]
struct Pulls {
    came: u64,
    pulls: Vec<Waiting>,
}

/// A consumer's turn.
#[derive(Debug)]
struct Turn {
    life: Life,
    again: bool,
    /// How many had come when it began.
    came: u64,
}

impl Table {
    /// Has a pull wait.
    ///
    /// # Errors
    /// Why its consumer was not reached a moment ago; `QueueFull`; `Closed`.
    fn add(&mut self, waiting: Waiting, now: Instant) -> Result<()> {
        if self.closed {
            return Err(closed());
        }
        let life = (Arc::clone(&waiting.pull.consumer), waiting.pull.incarnation);
        let failed = self.failed.get(&life);
        if let Some((at, error)) = failed
            && now.duration_since(*at) < PAUSE
        {
            let ago = now.duration_since(*at).as_millis();
            return Err(error.clone().context(format_args!("the attempt to reach it {ago} ms ago")));
        }
        if self.pulls >= MOST_PULLS {
            let message =
                format!("{MOST_PULLS} pulls wait for their consumers to be reached, which is the limit");
            return Err(Error::new(ErrorKind::QueueFull, message));
        }
        let line = if failed.is_some() { &mut self.again } else { &mut self.newcomers };
        self.pulls += 1;
        let came = &mut self.came;
        let pulls = self.waiting.entry(life).or_insert_with_key(|life| {
            line.push_back(life.clone());
            *came += 1;
            Pulls { came: *came, pulls: Vec::new() }
        });
        pulls.pulls.push(waiting);
        Ok(())
    }

    /// Whose turn it is, if a thread may be at one more.
    fn begin(&mut self) -> Option<Turn> {
        if self.under_way >= MOST {
            return None;
        }
        let free = |life: &Life| !self.names.contains(&life.0);
        let newcomer = if self.latest {
            self.newcomers.iter().rposition(free)
        } else {
            self.newcomers.iter().position(free)
        };
        let may_again = self.again_under_way < MOST_AGAIN;
        let other = may_again.then(|| self.again.iter().position(free)).flatten();
        let again = other.is_some() && (newcomer.is_none() || self.in_a_row + 1 >= EVERY);
        let life = if again { self.again.remove(other?) } else { self.newcomers.remove(newcomer?) }?;
        if again {
            self.in_a_row = 0;
        } else {
            self.in_a_row = self.in_a_row.saturating_add(1);
            self.latest = !self.latest;
        }
        self.under_way += 1;
        self.again_under_way += usize::from(again);
        self.names.insert(Arc::clone(&life.0));
        Some(Turn { life, again, came: self.came })
    }

    /// A turn is over. Returns what waited for it.
    fn end(&mut self, turn: &Turn, failed: Option<&Error>, now: Instant) -> Vec<Waiting> {
        self.under_way -= 1;
        self.again_under_way -= usize::from(turn.again);
        self.names.remove(&turn.life.0);
        self.failed.remove(&turn.life);
        if let Some(error) = failed {
            if self.failed.len() >= MOST_KNOWN {
                self.failed.retain(|_, (at, _)| now.duration_since(*at) < PAUSE);
            }
            self.failed.retain(|_, (at, _)| now.duration_since(*at) < MEMORY);
            if self.failed.len() < MOST_KNOWN {
                self.failed.insert(turn.life.clone(), (now, error.clone()));
            }
        }
        let mut waiting = self.waiting.remove(&turn.life).unwrap_or_default().pulls;
        // Nothing answers under the name: no other life of it that was there then. One that came later may be reached.
        if failed.is_some_and(|error| error.kind() == ErrorKind::PeerUnreachable) {
            let over = |life: &Life, pulls: &mut Pulls| life.0 == turn.life.0 && pulls.came <= turn.came;
            waiting.extend(self.waiting.extract_if(over).flat_map(|(_, pulls)| pulls.pulls));
            for line in [&mut self.newcomers, &mut self.again] {
                line.retain(|life| self.waiting.contains_key(life));
            }
        }
        self.pulls -= waiting.len();
        waiting
    }
}

impl Reaching {
    /// Reaches for nobody any more. Whoever serves the pulls that waited tells them why.
    pub(super) fn close(&self) {
        let mut table = self.table.lock();
        table.closed = true;
        table.pulls = 0;
        table.waiting.clear();
        table.newcomers.clear();
        table.again.clear();
    }
}

impl Inner {
    /// Has a pull wait until its consumer is reached, and go on then.
    pub(super) fn reach(self: &Arc<Self>, pull: PullId, deadline: Deadline) {
        let (added, turn) = {
            let mut table = self.reaching.table.lock();
            let added = table.add(Waiting { pull: pull.clone(), deadline }, Instant::now());
            (added, table.begin())
        };
        if let Err(error) = added {
            self.serve_pull(pull, deadline, Err(error));
        }
        let mut next = turn;
        while let Some(turn) = next {
            let Err(error) = self.start(&turn) else { return };
            self.reached(&turn, &Err(Error::os("start a thread omni-reach", &error)), false);
            // Others of its name may have waited for it.
            next = self.reaching.table.lock().begin();
        }
    }

    /// Starts a thread that takes this turn, and those after it.
    fn start(self: &Arc<Self>, turn: &Turn) -> io::Result<()> {
        let (inner, turn) = (Arc::downgrade(self), Turn { life: turn.life.clone(), ..*turn });
        let thread = thread::Builder::new().name("omni-reach".to_owned()).spawn(move || {
            let _at_work = AtWork::begin();
            let mut next = Some(turn);
            while let Some(turn) = next {
                next = take(&inner, &turn);
            }
        });
        thread.map(drop)
    }

    /// Has what waited for a consumer go on.
    fn reached(self: &Arc<Self>, turn: &Turn, outcome: &Result<Segment>, remember: bool) {
        let failed = outcome.as_ref().err().filter(|_| remember);
        let waiting = self.reaching.table.lock().end(turn, failed, Instant::now());
        for Waiting { pull, deadline } in waiting {
            self.serve_pull(pull, deadline, outcome.clone());
        }
    }
}

/// Reaches for a consumer. Returns the next, if it is anybody's turn. A connector that is closed does not wait for this,
/// so it is not held meanwhile.
fn take(inner: &Weak<Inner>, turn: &Turn) -> Option<Turn> {
    let (engine, deadline) = {
        let inner = inner.upgrade()?;
        (inner.engine.clone(), Deadline::after(Duration::from_millis(inner.config.liveness_ms)))
    };
    let (name, incarnation) = &turn.life;
    let started = Instant::now();
    let outcome = engine.open_life(name, *incarnation, deadline).map_err(|error| not_reached(error, started));
    let inner = inner.upgrade()?;
    inner.reached(turn, &outcome, true);
    inner.reaching.table.lock().begin()
}

/// Why a peer was not reached, where not the time of whoever asked is over, but that for a connection.
pub(super) fn not_reached(error: Error, started: Instant) -> Error {
    match error.kind() {
        ErrorKind::DeadlineExceeded => {
            let message =
                format!("not reached within {} ms: {}", started.elapsed().as_millis(), error.message());
            Error::new(ErrorKind::PeerUnreachable, message)
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(consumer: usize, pull: u64) -> Waiting {
        let pull = PullId { consumer: consumer.to_string().into(), incarnation: Incarnation(1), pull };
        Waiting { pull, deadline: Deadline::NEVER }
    }

    fn unreachable() -> Error {
        Error::new(ErrorKind::PeerUnreachable, "nothing answers")
    }

    #[test]
    fn the_pulls_of_a_consumer_share_one_attempt_and_its_reason() {
        let (mut table, now) = (Table::default(), Instant::now());
        (0..9).for_each(|pull| table.add(waiting(1, pull), now).unwrap());
        table.add(waiting(2, 0), now).unwrap();
        let turn = table.begin().unwrap();
        assert_eq!(&*turn.life.0, "1");
        assert_eq!(&*table.begin().unwrap().life.0, "2");
        assert!(table.begin().is_none());
        table.add(waiting(1, 9), now).unwrap();
        assert_eq!(table.end(&turn, Some(&unreachable()), now).len(), 10);
        let error = table.add(waiting(1, 10), now + PAUSE / 2).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerUnreachable);
        assert!(error.message().contains("500 ms ago: nothing answers"), "{error}");
        table.add(waiting(1, 10), now + PAUSE).unwrap();
        let turn = table.begin().unwrap();
        assert!(turn.again);
        assert_eq!(table.end(&turn, None, now + PAUSE).len(), 1);
        table.add(waiting(1, 11), now + PAUSE).unwrap();
        assert!(!table.begin().unwrap().again, "it was reached, and is as good as new");
    }

    #[test]
    fn consumers_that_were_not_reached_leave_room_for_newcomers() {
        let (mut table, now) = (Table::default(), Instant::now());
        for consumer in 0..MOST {
            table.add(waiting(consumer, 0), now).unwrap();
            let turn = table.begin().unwrap();
            table.end(&turn, Some(&unreachable()), now);
        }
        let later = now + PAUSE;
        (0..MOST).for_each(|consumer| table.add(waiting(consumer, 1), later).unwrap());
        let turns: Vec<_> = std::iter::from_fn(|| table.begin()).collect();
        assert_eq!(turns.len(), MOST_AGAIN);
        table.add(waiting(MOST, 0), later).unwrap();
        assert_eq!(*table.begin().unwrap().life.0, *MOST.to_string());
        table.end(&turns[0], None, later);
        assert!(table.begin().unwrap().again, "the next of those that wait");
    }

    #[test]
    fn consumers_that_were_not_reached_have_their_turn_beside_any_number_of_newcomers() {
        let (mut table, now) = (Table::default(), Instant::now());
        table.add(waiting(0, 0), now).unwrap();
        let turn = table.begin().unwrap();
        table.end(&turn, Some(&unreachable()), now);
        let later = now + PAUSE;
        table.add(waiting(0, 1), later).unwrap();
        let turns: Vec<_> = (1..=EVERY as usize)
            .map(|newcomer| {
                table.add(waiting(newcomer, 0), later).unwrap();
                let turn = table.begin().unwrap();
                table.end(&turn, None, later);
                turn
            })
            .collect();
        assert_eq!(turns.iter().filter(|turn| turn.again).count(), 1, "{turns:?}");
        assert_eq!(table.begin().map(|turn| turn.again), Some(false), "the newcomer that had to wait");
    }

    #[test]
    fn the_latest_newcomer_waits_for_one_attempt_and_not_for_all_before_it() {
        let (mut table, now) = (Table::default(), Instant::now());
        for consumer in 0..10 * MOST {
            table.add(waiting(consumer, 0), now).unwrap();
        }
        let turns: Vec<_> = std::iter::from_fn(|| table.begin()).collect();
        assert_eq!(turns.len(), MOST);
        table.add(waiting(10 * MOST, 0), now).unwrap();
        let mut next = turns[..2].iter().map(|turn| {
            table.end(turn, Some(&unreachable()), now);
            table.begin().unwrap().life.0.parse::<usize>().unwrap()
        });
        let [first, second] = [next.next().unwrap(), next.next().unwrap()];
        assert!([first, second].contains(&(10 * MOST)), "{first} and {second}");
        assert!(first.min(second) < MOST, "the oldest that waits has its turn, too");
    }

    #[test]
    fn lives_of_one_name_are_reached_for_one_after_the_other_and_end_with_it() {
        let (mut table, now) = (Table::default(), Instant::now());
        let life = |life: u64| {
            let pull = PullId { consumer: "c".into(), incarnation: Incarnation(life), pull: life };
            Waiting { pull, deadline: Deadline::NEVER }
        };
        (0..9).for_each(|number| table.add(life(number), now).unwrap());
        table.add(waiting(1, 0), now).unwrap();
        let first = table.begin().unwrap();
        let other = table.begin().unwrap();
        assert!(table.begin().is_none(), "the others of its name wait");
        let restarted = Error::new(ErrorKind::PeerRestarted, "another lives there");
        let [of_name, elsewhere] = if &*first.life.0 == "c" { [first, other] } else { [other, first] };
        assert_eq!(table.end(&of_name, Some(&restarted), now).len(), 1);
        let next = table.begin().unwrap();
        assert_eq!(&*next.life.0, "c");
        assert_eq!(table.end(&next, Some(&unreachable()), now).len(), 8, "nothing answers under the name");
        assert!(table.begin().is_none());
        assert_eq!(table.end(&elsewhere, None, now).len(), 1);
        assert_eq!((table.pulls, table.under_way, table.names.len(), table.waiting.len()), (0, 0, 0, 0));
    }

    #[test]
    fn a_life_that_came_during_the_attempt_at_another_is_reached_for_itself() {
        let (mut table, now) = (Table::default(), Instant::now());
        let life = |life: u64| {
            let pull = PullId { consumer: "c".into(), incarnation: Incarnation(life), pull: life };
            Waiting { pull, deadline: Deadline::NEVER }
        };
        table.add(life(1), now).unwrap();
        table.add(life(2), now).unwrap();
        let turn = table.begin().unwrap();
        table.add(life(3), now).unwrap();
        assert_eq!(table.end(&turn, Some(&unreachable()), now).len(), 2);
        let turn = table.begin().unwrap();
        assert_eq!(turn.life.1, Incarnation(3));
        assert_eq!(table.end(&turn, None, now).len(), 1);
        assert!(table.begin().is_none());
    }

    #[test]
    fn what_is_remembered_and_what_waits_is_bounded() {
        let (mut table, now) = (Table::default(), Instant::now());
        for consumer in 0..2 * MOST_KNOWN {
            table.add(waiting(consumer, 0), now).unwrap();
            let turn = table.begin().unwrap();
            table.end(&turn, Some(&unreachable()), now);
        }
        assert_eq!(table.failed.len(), MOST_KNOWN);
        let later = now + MEMORY;
        (0..MOST_PULLS as u64).for_each(|pull| table.add(waiting(1, pull), later).unwrap());
        assert_eq!(table.add(waiting(2, 0), later).unwrap_err().kind(), ErrorKind::QueueFull);
        let turn = table.begin().unwrap();
        table.end(&turn, Some(&unreachable()), later);
        assert_eq!((table.failed.len(), table.pulls, table.under_way), (1, 0, 0));
    }
}
