//! What every transport must show: the contract, as tests.
//!
//! A transport's integration test is one line, and becomes a `#[test]` for each case:
//!
//! ```
//! posthorse_testkit::conformance!({
//!     let hub = posthorse_testkit::MemoryHub::new();
//!     posthorse_testkit::conformance::Subject::new(move || hub.transport())
//! });
//! # fn main() {}
//! ```
//!
//! Each case makes its transports anew, two at least, with a [`Registry`](posthorse_segment::Registry) each for a
//! gate, and plays the engine between them. Cases that a transport's [`Capabilities`](posthorse_core::Capabilities)
//! do not promise pass without doing anything. The suite looks at the bytes, so the memory it is given is host memory.

mod ending;
mod leaking;
mod meeting;
mod moving;
mod notifying;
mod pair;
mod refusing;
mod subject;
mod withdrawing;

pub use subject::Subject;

/// One promise of the contract.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Its name, which is that of the test.
    pub name: &'static str,
    /// Shows that the promise is kept.
    ///
    /// # Panics
    /// When it is not.
    pub run: fn(&Subject),
}

/// Runs every case, one after the other.
///
/// # Panics
/// At the first promise that is not kept.
pub fn check(subject: &Subject) {
    for case in CASES {
        println!("{}", case.name);
        (case.run)(subject);
    }
}

/// Runs the case of this name. `test` is the name of the test that does so.
///
/// # Panics
/// When there is none, or its promise is not kept.
pub fn run(name: &str, test: &str, subject: impl FnOnce() -> Subject) {
    let case = CASES.iter().find(|case| case.name == name).expect("a case of this name");
    let run = || (case.run)(&subject());
    if name.starts_with(COUNTING) {
        // `module_path!` begins with the crate, and the names of tests do not.
        let test = test.split_once("::").map_or(test, |(_, rest)| rest);
        crate::peer::isolated(test, run);
    } else {
        run();
    }
}

/// Cases so named count what the whole process has open: they run in one of their own.
const COUNTING: &str = "nothing_leaks";

macro_rules! cases {
    (($d:tt) $($module:ident: $($name:ident)*;)*) => {
        /// Every case.
        pub const CASES: &[Case] = &[$($(Case { name: stringify!($name), run: $module::$name },)*)*];

        /// Makes a `#[test]` of each case of the conformance suite, for the transport that the given expression
        /// describes: a [`Subject`](crate::conformance::Subject).
        #[macro_export]
        macro_rules! conformance {
            ($d subject:expr) => {
                mod conformance {
                    use super::*;

                    fn subject() -> $d crate::conformance::Subject {
                        $d subject
                    }

                    $($(#[test]
                    fn $name() {
                        let name = stringify!($name);
                        let test = concat!(module_path!(), "::", stringify!($name));
                        $d crate::conformance::run(name, test, subject);
                    })*)*
                }
            };
        }
    };
}

cases! { ($)
    moving:
        every_size_is_moved_both_ways
        every_level_is_reached
        more_than_the_queue_holds_is_moved
        checksums_of_good_data_agree
        many_threads_share_a_path
        both_sides_move_at_once;
    refusing:
        what_no_grant_covers_is_refused
        a_refusal_among_others_harms_nobody;
    withdrawing:
        a_revoked_grant_is_written_no_more
        a_revoked_grant_is_read_no_more
        an_unregistered_region_is_touched_no_more
        a_lease_holds_its_grant;
    ending:
        cancelling_ends_what_it_names
        cancelling_spares_the_rest
        fencing_ends_everything
        disconnecting_ends_everything
        stopping_ends_everything
        a_peer_that_stops_ends_everything;
    meeting:
        it_describes_itself
        a_peer_without_it_is_named
        a_peer_that_stopped_is_named
        fingerprints_must_agree
        a_peer_comes_back_under_its_name
        unknown_paths_are_refused;
    notifying:
        notifications_arrive_once_and_in_order
        a_notification_finds_what_was_visible_before_it
        a_notification_that_is_too_long_is_refused
        a_notification_that_nobody_takes_is_refused
        a_notification_that_was_delivered_is_not_sent_again;
    leaking:
        nothing_leaks_from_registering
        nothing_leaks_from_stopping;
}
