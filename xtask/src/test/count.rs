//! Reading from a test runner's output how many cases passed and failed.

/// What a runner says of its test cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) passed: u64,
    pub(super) failed: u64,
    /// Passed over by the runner itself.
    pub(super) ignored: u64,
}

/// Cases that ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) passed: u64,
    pub(super) failed: u64,
}

impl Tally {
    /// What to believe of a runner that gave `counts` (if any) and ended well or not; with it, how many
    /// cases it passed over.
    ///
    /// A runner that fails without a failed case (its build broke, say) counts as one failed case, and so
    /// does one that succeeds without saying what it ran.
    pub(super) fn of(counts: Option<Counts>, success: bool) -> (Self, u64) {
        let Counts { passed, mut failed, ignored } = counts.unwrap_or_default();
        if failed == 0 && (!success || counts.is_none()) {
            failed = 1;
        }
        (Self { passed, failed }, ignored)
    }
}

/// The counts in the summary line of cargo-nextest:
/// `Summary [   1.2s] 5 tests run: 3 passed (1 slow), 1 failed, 1 timed out, 2 skipped`.
pub(super) fn nextest(output: &str) -> Option<Counts> {
    let summary = output.lines().rfind(|line| line.trim_start().starts_with("Summary ["))?;
    let (_, counted) = summary.split_once(" run: ")?;
    let mut counts = Counts::default();
    for (number, what) in entries(&without_parentheses(counted)) {
        match what {
            "passed" => counts.passed += number,
            "skipped" => counts.ignored += number,
            _ => counts.failed += number,
        }
    }
    Some(counts)
}

/// The sum over all lines of the standard test harness:
/// `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s`.
pub(super) fn libtest(output: &str) -> Option<Counts> {
    let mut results = output.lines().filter_map(|line| line.trim().strip_prefix("test result: ")).peekable();
    results.peek()?;
    let mut counts = Counts::default();
    for result in results {
        let (_, counted) = result.split_once(". ")?;
        for (number, what) in entries(counted) {
            match what {
                "passed" | "measured" => counts.passed += number,
                "failed" => counts.failed += number,
                "ignored" => counts.ignored += number,
                _ => {}
            }
        }
    }
    Some(counts)
}

/// The pairs in `3 passed, 1 timed out` or `3 passed; 1 ignored`.
fn entries(text: &str) -> impl Iterator<Item = (u64, &str)> {
    text.split([',', ';']).filter_map(|entry| {
        let (number, what) = entry.trim().split_once(' ')?;
        Some((number.parse().ok()?, what.trim()))
    })
}

fn without_parentheses(text: &str) -> String {
    let mut depth = 0_u32;
    text.chars()
        .filter(|c| {
            depth += u32::from(*c == '(');
            let keep = depth == 0;
            depth = depth.saturating_sub(u32::from(*c == ')'));
            keep
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn counts(passed: u64, failed: u64, ignored: u64) -> Option<Counts> {
        Some(Counts { passed, failed, ignored })
    }

    #[test]
    fn a_nextest_summary_is_read_to_the_last_kind() {
        for (line, expected) in [
            ("     Summary [   0.004s] 2 tests run: 2 passed, 0 skipped", counts(2, 0, 0)),
            ("     Summary [   0.004s] 1 test run: 1 passed (1 slow), 3 skipped", counts(1, 0, 3)),
            (
                "Summary [ 1s] 7/9 tests run: 3 passed (1 slow, 1 leaky), 2 failed, 1 exec failed, 1 timed out, 2 skipped",
                counts(3, 4, 2),
            ),
            ("no summary", None),
        ] {
            assert_eq!(nextest(&format!("    PASS a\n{line}\nerror: test run failed\n")), expected, "{line}");
        }
    }

    #[test]
    fn libtest_results_are_summed() {
        let output = "running 2 tests\n\
            test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 4 filtered out; finished in 0.00s\n\
            test result: FAILED. 1 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
        assert_eq!(libtest(output), counts(3, 3, 1));
        assert_eq!(libtest("error: could not compile"), None);
    }

    #[test]
    fn a_runner_that_breaks_counts_as_one_failed_case() {
        assert_eq!(Tally::of(None, false), (Tally { passed: 0, failed: 1 }, 0));
        assert_eq!(Tally::of(None, true), (Tally { passed: 0, failed: 1 }, 0));
        assert_eq!(Tally::of(counts(5, 0, 2), false), (Tally { passed: 5, failed: 1 }, 2));
        assert_eq!(Tally::of(counts(5, 2, 0), false), (Tally { passed: 5, failed: 2 }, 0));
        assert_eq!(Tally::of(counts(5, 0, 1), true), (Tally { passed: 5, failed: 0 }, 1));
    }
}
