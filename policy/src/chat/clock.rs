//! The date that templates may print, fixed so that every process renders the same prompt.

use std::{fmt::Write, str::FromStr};

/// A point in time as `strftime_now` shows it. It comes from the recipe and never from a clock: a
/// prompt that changes at midnight would differ between actor and learner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateDate {
    year: u16,
    month: u8,
    day: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

/// The text is not a date.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a date is written 2026-11-29 or 2026-11-29T19:30:00")]
pub struct NotADate;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

impl FromStr for TemplateDate {
    type Err = NotADate;

    fn from_str(text: &str) -> Result<Self, NotADate> {
        let (date, time) = text.split_once(['T', ' ']).unwrap_or((text, "00:00:00"));
        let numbers = |text: &str, separator: char| -> Option<[u16; 3]> {
            let parts: Vec<u16> =
                text.split(separator).map(|p| p.parse().ok()).collect::<Option<_>>()?;
            parts.try_into().ok()
        };
        let [year, month, day] = numbers(date, '-').ok_or(NotADate)?;
        let [hour, minute, second] = numbers(time, ':').ok_or(NotADate)?;
        let byte = |value: u16, low: u8, high: u8| {
            u8::try_from(value).ok().filter(|v| (low..=high).contains(v)).ok_or(NotADate)
        };
        if !(1..=9999).contains(&year) {
            return Err(NotADate);
        }
        let month = byte(month, 1, 12)?;
        let day = byte(day, 1, days_in(year, month))?;
        Ok(Self {
            year,
            month,
            day,
            hour: byte(hour, 0, 23)?,
            minute: byte(minute, 0, 59)?,
            second: byte(second, 0, 59)?,
        })
    }
}

fn is_leap(year: u16) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_in(year: u16, month: u8) -> u8 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

impl TemplateDate {
    fn day_of_year(self) -> u16 {
        (1..self.month).map(|m| u16::from(days_in(self.year, m))).sum::<u16>() + u16::from(self.day)
    }

    /// 0 is Monday.
    fn weekday(self) -> u8 {
        let years = u32::from(self.year) - 1;
        let days =
            years * 365 + years / 4 - years / 100 + years / 400 + u32::from(self.day_of_year());
        // 0001-01-01 was a Monday.
        ((days - 1) % 7) as u8
    }

    /// Python's `strftime` in the C locale; an unknown directive is printed as it stands.
    pub fn strftime(self, format: &str) -> String {
        let month = MONTHS.get(usize::from(self.month) - 1).copied().unwrap_or_default();
        let day = DAYS.get(usize::from(self.weekday())).copied().unwrap_or_default();
        let hour12 = (self.hour + 11) % 12 + 1;
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next();
            let unpadded = directive == Some('-');
            if unpadded {
                directive = chars.next();
            }
            let mut number = |value: u16, width: usize| {
                let width = if unpadded { 0 } else { width };
                let _ = write!(out, "{value:0width$}");
            };
            match directive {
                Some('Y') => number(self.year, 4),
                Some('y') => number(self.year % 100, 2),
                Some('m') => number(self.month.into(), 2),
                Some('d') => number(self.day.into(), 2),
                Some('H') => number(self.hour.into(), 2),
                Some('I') => number(hour12.into(), 2),
                Some('M') => number(self.minute.into(), 2),
                Some('S') => number(self.second.into(), 2),
                Some('j') => number(self.day_of_year(), 3),
                Some('f') => out.push_str("000000"),
                Some('e') => drop(write!(out, "{:2}", self.day)),
                Some('B') => out.push_str(month),
                Some('b' | 'h') => out.push_str(&month[..3]),
                Some('A') => out.push_str(day),
                Some('a') => out.push_str(&day[..3]),
                Some('p') => out.push_str(if self.hour < 12 { "AM" } else { "PM" }),
                Some('F') => out.push_str(&self.strftime("%Y-%m-%d")),
                Some('T' | 'X') => out.push_str(&self.strftime("%H:%M:%S")),
                Some('D' | 'x') => out.push_str(&self.strftime("%m/%d/%y")),
                Some('R') => out.push_str(&self.strftime("%H:%M")),
                Some('c') => out.push_str(&self.strftime("%a %b %e %H:%M:%S %Y")),
                Some('%') => out.push('%'),
                Some(other) => {
                    out.push('%');
                    out.push(other);
                }
                None => out.push('%'),
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_print_as_strftime_does() -> Result<(), NotADate> {
        let date: TemplateDate = "2024-07-26T05:07:09".parse()?;
        assert_eq!(date.strftime("%d %b %Y"), "26 Jul 2024");
        assert_eq!(
            date.strftime("%A %B %-d, %Y %I:%M %p %j %%"),
            "Friday July 26, 2024 05:07 AM 208 %"
        );
        let date: TemplateDate = "2026-11-29".parse()?;
        assert_eq!(date.strftime("%a %F %T"), "Sun 2026-11-29 00:00:00");
        Ok(())
    }

    #[test]
    fn what_is_no_date_is_refused() {
        for bad in [
            "",
            "2026",
            "2026-13-01",
            "2025-02-29",
            "2026-1-1-1",
            "x-y-z",
            "0000-01-01",
            "2026-01-01T24:00:00",
        ] {
            assert_eq!(bad.parse::<TemplateDate>(), Err(NotADate), "{bad}");
        }
    }
}
