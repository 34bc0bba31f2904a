//! The calculator of the office: whole numbers, `+`, `-`, `*`, parentheses and blanks; 64 bits, exact.

use crate::Raised;

/// Longest expression, in bytes.
const MAX_BYTES: usize = 200;
/// Deepest nesting of parentheses and signs.
const MAX_DEPTH: u32 = 32;

/// A calculated expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Calculated {
    /// Its value.
    pub(super) value: i64,
    /// The numbers that stand in it, in order.
    pub(super) numbers: Vec<i64>,
}

/// Calculates an expression.
pub(super) fn calculate(text: &str) -> Result<Calculated, Raised> {
    if text.len() > MAX_BYTES {
        return Err(Raised::new(format!("The expression is longer than {MAX_BYTES} bytes.")));
    }
    let mut reader = Reader { rest: text, numbers: Vec::new() };
    let value = reader.sum(0)?;
    match reader.peek() {
        None => Ok(Calculated { value, numbers: reader.numbers }),
        Some(c) => Err(unexpected(c)),
    }
}

fn unexpected(c: char) -> Raised {
    Raised::new(format!("Unexpected {c:?}: use whole numbers, +, -, * and parentheses."))
}

struct Reader<'a> {
    rest: &'a str,
    numbers: Vec<i64>,
}

impl Reader<'_> {
    fn peek(&mut self) -> Option<char> {
        self.rest = self.rest.trim_start_matches(' ');
        self.rest.chars().next()
    }

    fn take(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        if found {
            self.rest = self.rest.get(wanted.len_utf8()..).unwrap_or_default();
        }
        found
    }

    fn sum(&mut self, depth: u32) -> Result<i64, Raised> {
        let mut value = self.product(depth)?;
        loop {
            let next = if self.take('+') {
                let other = self.product(depth)?;
                value.checked_add(other)
            } else if self.take('-') {
                let other = self.product(depth)?;
                value.checked_sub(other)
            } else {
                return Ok(value);
            };
            value = next.ok_or_else(too_large)?;
        }
    }

    fn product(&mut self, depth: u32) -> Result<i64, Raised> {
        let mut value = self.factor(depth)?;
        while self.take('*') {
            let other = self.factor(depth)?;
            value = value.checked_mul(other).ok_or_else(too_large)?;
        }
        Ok(value)
    }

    fn factor(&mut self, depth: u32) -> Result<i64, Raised> {
        if depth >= MAX_DEPTH {
            return Err(Raised::new(format!("Nested deeper than {MAX_DEPTH}.")));
        }
        if self.take('(') {
            let value = self.sum(depth + 1)?;
            return if self.take(')') {
                Ok(value)
            } else {
                Err(Raised::new("A closing parenthesis is missing."))
            };
        }
        if self.take('-') {
            return self.factor(depth + 1)?.checked_neg().ok_or_else(too_large);
        }
        self.number()
    }

    fn number(&mut self) -> Result<i64, Raised> {
        let first = self.peek();
        let end = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        if digits.is_empty() {
            return Err(first.map_or_else(|| Raised::new("A number is missing."), unexpected));
        }
        let value = digits.parse().map_err(|_| too_large())?;
        self.rest = rest;
        self.numbers.push(value);
        Ok(value)
    }
}

fn too_large() -> Raised {
    Raised::new("The numbers are too large.")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Result<i64, String> {
        calculate(text).map(|done| done.value).map_err(|raised| raised.0)
    }

    #[test]
    fn precedence_signs_and_parentheses() {
        for (text, expected) in [
            ("3*12", 36),
            (" 3 * 12 - 5 ", 31),
            ("2+3*4", 14),
            ("(2+3)*4", 20),
            ("10-3-2", 5),
            ("-(2-5)*-2", -6),
            ("007", 7),
            ("--3", 3),
        ] {
            assert_eq!(value(text), Ok(expected), "{text}");
        }
        let done = calculate("(3*12)+4*-5").expect("calculates");
        assert_eq!(done.numbers, [3, 12, 4, 5]);
    }

    #[test]
    fn what_is_no_expression_raises() {
        let deep = "(".repeat(100);
        let signs = "-".repeat(150) + "1";
        let long = "1".repeat(201);
        for text in [
            "",
            " ",
            "3*",
            "*3",
            "3 4",
            "(3",
            "3)",
            "a",
            "3.5",
            "3,5",
            "3/2",
            "２",
            "3\n*2",
            "\0",
            "9223372036854775808",
            "9223372036854775807+1",
            "9223372036854775807*2",
            &deep,
            &signs,
            &long,
        ] {
            assert!(value(text).is_err_and(|message| !message.contains('\n')), "{text:?}");
        }
    }
}
