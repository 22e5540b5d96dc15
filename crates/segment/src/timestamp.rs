//! The time of publication in a descriptor, for people to read: nothing compares it.

use std::time::{SystemTime, UNIX_EPOCH};

/// `YYYY-MM-DD HH:MM:SS.uuuuuu` in UTC. A time before 1970 reads as 1970.
pub(crate) fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (mut days, second, micros) =
        (since.as_secs() / 86_400, since.as_secs() % 86_400, since.subsec_micros());
    let mut year = 1970_u64;
    while days >= days_of_year(year) {
        days -= days_of_year(year);
        year += 1;
    }
    let february = days_of_year(year) - 337;
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (day, hour, minute, second) = (days + 1, second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{micros:06}")
}

const fn days_of_year(year: u64) -> u64 {
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    if leap { 366 } else { 365 }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn known_moments() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00.000007"),
            (951_782_399, "2000-02-28 23:59:59.000007"),
            (951_782_400, "2000-02-29 00:00:00.000007"),
            (1_709_251_199, "2024-02-29 23:59:59.000007"),
            (1_709_251_200, "2024-03-01 00:00:00.000007"),
            (1_798_761_599, "2026-12-31 23:59:59.000007"),
            (4_102_444_800, "2100-01-01 00:00:00.000007"),
        ] {
            assert_eq!(timestamp(UNIX_EPOCH + Duration::new(seconds, 7_000)), text);
        }
    }
}
