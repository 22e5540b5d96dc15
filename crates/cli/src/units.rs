//! Sizes and durations as people write them.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

/// What the helps say of sizes.
macro_rules! sizes {
    () => {
        "a whole number with one of B, KiB, MiB, GiB, TiB (powers of 1024), KB, MB, GB, TB (powers of 1000)"
    };
}

/// What the helps say of durations.
macro_rules! times {
    () => {
        "a whole number above 0 with one of us, ms, s, m, h"
    };
}

/// The end of the help of a command that takes sizes.
pub(crate) const SIZE_HELP: &str =
    concat!("SIZE is ", sizes!(), ": 64KiB, 190MiB; without a unit it is bytes.");

/// The end of the help of a command that takes sizes and durations.
pub(crate) const SIZE_AND_TIME_HELP: &str = concat!(
    "SIZE is ",
    sizes!(),
    ": 64KiB, 190MiB; without a unit it is bytes.\nTIME is ",
    times!(),
    ": 500ms, 3s."
);

/// The end of the help of a command that takes lists of sizes besides.
pub(crate) const LISTS_HELP: &str = concat!(
    "NAMES, OPS, SIZES and COUNTS are one or more, separated by commas: 4KiB,1MiB.\n",
    "A size is ",
    sizes!(),
    "; without a unit it is bytes.\nTIME is ",
    times!(),
    ": 500ms, 3s.\n",
    "The book's page Measuring explains the columns."
);

/// What each unit of size stands for, in bytes, largest first.
const SIZES: &[(&str, u64)] = &[
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
    ("", 1),
];

/// What each unit of time stands for, in microseconds.
const TIMES: &[(&str, u64)] =
    &[("us", 1), ("ms", 1_000), ("s", 1_000_000), ("m", 60_000_000), ("h", 3_600_000_000)];

/// Reads a size: `4096`, `64KiB`, `190MiB`, `1GB`.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    parse(text, SIZES).ok_or_else(|| concat!("not a size; accepted: ", sizes!()).to_owned())
}

/// Reads a size that is not zero.
pub(crate) fn parse_positive_size(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        0 => Err("accepted: at least 1 byte".to_owned()),
        size => Ok(size),
    }
}

/// Reads an address such as `10.0.0.1:4789` or `node-1:4789`: the first that the name has.
pub(crate) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let mut found = text.to_socket_addrs().map_err(|error| format!("{error}; accepted: HOST:PORT"))?;
    found.next().ok_or_else(|| "this name has no address; accepted: HOST:PORT".to_owned())
}

/// Reads a duration: `500ms`, `3s`, `2m`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    match parse(text, TIMES) {
        Some(micros) if micros > 0 => Ok(Duration::from_micros(micros)),
        _ => Err(concat!("not a duration; accepted: ", times!()).to_owned()),
    }
}

fn parse(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok()?;
    let (_, scale) = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit.trim_start()))?;
    number.checked_mul(*scale)
}

/// A size in the largest power of 1024 that leaves no rest, such as `4 KiB`.
pub(crate) fn size(bytes: u64) -> String {
    let exact = |(_, scale): &&(&str, u64)| {
        scale.is_power_of_two() && bytes >= *scale && bytes.is_multiple_of(*scale)
    };
    match SIZES.iter().filter(|(name, _)| !name.is_empty()).find(exact) {
        Some((unit, scale)) => format!("{} {unit}", bytes / scale),
        None => format!("{bytes} B"),
    }
}

/// A size for people: one decimal in the largest power of 1024 that it reaches, such as `185.9 MiB`.
pub(crate) fn rounded_size(bytes: u64) -> String {
    let reached = |(_, scale): &&(&str, u64)| scale.is_power_of_two() && *scale > 1 && bytes >= *scale;
    match SIZES.iter().find(reached) {
        Some((unit, scale)) if !bytes.is_multiple_of(*scale) => {
            format!("{:.1} {unit}", bytes as f64 / *scale as f64)
        }
        _ => size(bytes),
    }
}

/// Four significant digits of a measured value: more would be noise.
pub(crate) fn significant(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let decimals = 3 - value.abs().log10().floor() as i32;
    // By way of text, since scaling up and down would leave a rest.
    match usize::try_from(decimals) {
        Ok(decimals) => format!("{value:.decimals$}").parse().unwrap_or(value),
        Err(_) => {
            let scale = 10_f64.powi(-decimals);
            (value / scale).round() * scale
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn addresses_may_have_a_name() {
        assert!(parse_address("localhost:4789").unwrap().ip().is_loopback());
        assert_eq!(parse_address("10.0.0.1:1").unwrap().to_string(), "10.0.0.1:1");
        for bad in ["10.0.0.1", "", ":::", "host:70000"] {
            assert!(parse_address(bad).unwrap_err().contains("accepted: HOST:PORT"), "{bad}");
        }
    }

    #[test]
    fn sizes_are_read_in_every_unit() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("17B", 17),
            ("64KiB", 64 << 10),
            ("190MiB", 190 << 20),
            ("1 GiB", 1 << 30),
            ("2gb", 2_000_000_000),
            ("3KB", 3000),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "KiB", "1.5MiB", "-1", "12 Q", "1 MiB x", "99999999999TiB", "18446744073709551616"] {
            assert!(parse_size(text).unwrap_err().contains("MiB"), "{text}");
        }
        assert!(parse_positive_size("0").is_err());
    }

    #[test]
    fn durations_are_read_in_every_unit() {
        for (text, duration) in [
            ("250us", Duration::from_micros(250)),
            ("500ms", Duration::from_millis(500)),
            ("3s", Duration::from_secs(3)),
            ("2m", Duration::from_secs(120)),
        ] {
            assert_eq!(parse_duration(text), Ok(duration), "{text}");
        }
        for text in ["", "3", "0s", "1.5s", "3 years"] {
            assert!(parse_duration(text).unwrap_err().contains("ms"), "{text}");
        }
    }

    #[test]
    fn sizes_are_written_without_loss() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(4096), "4 KiB");
        assert_eq!(size(256 << 20), "256 MiB");
        assert_eq!(size(194_969_600), "190400 KiB");
        assert_eq!(size(1000), "1000 B");
    }

    #[test]
    fn sizes_for_people_have_one_decimal() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (4096, "4 KiB"),
            (57_344, "56 KiB"),
            (194_969_600, "185.9 MiB"),
            (3 << 29, "1.5 GiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(rounded_size(bytes), text);
        }
    }

    #[test]
    fn four_digits_are_kept() {
        for (value, kept) in
            [(0.0, 0.0), (12.3456, 12.35), (0.000_123_456, 0.000_123_5), (1_234_567.0, 1_235_000.0)]
        {
            assert!((significant(value) - kept).abs() <= kept * 1e-9, "{value}");
        }
        assert_eq!(significant(0.015_923_999_999_999_997).to_string(), "0.01592");
        assert_eq!(significant(f64::NAN), 0.0);
    }

    proptest! {
        #[test]
        fn a_written_size_is_read_back(bytes: u64) {
            prop_assert_eq!(parse_size(&size(bytes)), Ok(bytes));
        }

        #[test]
        fn no_text_is_too_strange(text: String) {
            let _ = parse_size(&text);
            let _ = parse_duration(&text);
        }
    }
}
