//! The events of a stream of type `text/event-stream`, read line by line, none of them longer than
//! [`MOST_BYTES`].

use std::{
    io::{self, BufRead, BufReader, Read},
    mem,
    time::Duration,
};

use super::{http::MOST_BYTES, session::Deadline};

/// A stream, and what it says of how to go on after its end.
pub(super) struct Events<R> {
    reader: BufReader<R>,
    /// The last line ended in a CR: a LF after it belongs to it.
    after_cr: bool,
    /// Names the last event, where events have names: what comes after it can be asked for.
    pub(super) last_id: Option<String>,
    /// How long to wait before that.
    pub(super) retry: Option<Duration>,
}

impl<R: Read> Events<R> {
    pub(super) fn new(reader: R) -> Self {
        Self { reader: BufReader::new(reader), after_cr: false, last_id: None, retry: None }
    }

    /// The data of the next event that is a message; nothing at the end of the stream. An event that
    /// the end cuts short is none.
    ///
    /// # Errors
    /// It is not there in time, it is too long, or the stream broke otherwise.
    pub(super) fn next(&mut self, deadline: Deadline) -> io::Result<Option<Vec<u8>>> {
        let (mut data, mut kind, mut id) = (Vec::new(), Vec::new(), None);
        while let Some(line) = self.line(deadline)? {
            if line.is_empty() {
                self.last_id = id.take().or_else(|| self.last_id.take());
                // A named event is none of the protocol's messages; one without data only has an id.
                let message = matches!(mem::take(&mut kind).as_slice(), b"" | b"message");
                let data: Vec<u8> = mem::take(&mut data);
                if message && !data.is_empty() {
                    return Ok(Some(data));
                }
                continue;
            }
            let colon = line.iter().position(|byte| *byte == b':').unwrap_or(line.len());
            let (field, value) = line.split_at(colon);
            let value = value.strip_prefix(b":").unwrap_or(value);
            let value = value.strip_prefix(b" ").unwrap_or(value);
            match field {
                b"data" => {
                    if !data.is_empty() {
                        data.push(b'\n');
                    }
                    data.extend_from_slice(value);
                    bounded(data.len())?;
                }
                b"event" => kind = value.to_vec(),
                // It goes into a header later on.
                b"id" if value.len() <= 1024 && value.iter().all(|b| (b' '..=b'~').contains(b)) => {
                    id = String::from_utf8(value.to_vec()).ok().filter(|id| !id.is_empty());
                }
                b"retry" => {
                    let text = String::from_utf8_lossy(value);
                    self.retry = text.parse().ok().map(Duration::from_millis).or(self.retry);
                }
                _ => {}
            }
        }
        Ok(None)
    }

    /// A line without its end; nothing at the end of the stream.
    fn line(&mut self, deadline: Deadline) -> io::Result<Option<Vec<u8>>> {
        let mut line = Vec::new();
        loop {
            // A stream that never pauses never asks for the time itself.
            if deadline.left().is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let read = self.reader.fill_buf()?;
            let Some(first) = read.first() else { return Ok(None) };
            if mem::take(&mut self.after_cr) && *first == b'\n' {
                self.reader.consume(1);
                continue;
            }
            let end = read.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let part = read.get(..end.unwrap_or(read.len())).unwrap_or_default();
            line.extend_from_slice(part);
            let used = part.len() + usize::from(end.is_some());
            self.after_cr = end.and_then(|end| read.get(end)) == Some(&b'\r');
            self.reader.consume(used);
            bounded(line.len())?;
            if end.is_some() {
                return Ok(Some(line));
            }
        }
    }
}

fn bounded(length: usize) -> io::Result<()> {
    match length as u64 > MOST_BYTES {
        true => Err(io::ErrorKind::FileTooLarge.into()),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives one byte at a time, as a slow server does.
    struct Drip<'a>(&'a [u8]);

    impl Read for Drip<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let (Some((first, rest)), Some(place)) = (self.0.split_first(), buffer.first_mut())
            else {
                return Ok(0);
            };
            (*place, self.0) = (*first, rest);
            Ok(1)
        }
    }

    fn all(text: &str) -> (Vec<String>, Option<String>, Option<Duration>) {
        let deadline = Deadline::within(Duration::from_secs(600));
        let mut events = Events::new(Drip(text.as_bytes()));
        let mut seen = Vec::new();
        while let Some(data) = events.next(deadline).expect("a sound stream") {
            seen.push(String::from_utf8(data).expect("text"));
        }
        (seen, events.last_id, events.retry)
    }

    #[test]
    fn events_are_read_as_the_standard_says() {
        assert_eq!(all("data: a\n\ndata:b\n\n").0, ["a", "b"]);
        assert_eq!(all("event: message\r\ndata: a\r\ndata:  b\r\n\r\n").0, ["a\n b"]);
        assert_eq!(all("data: a\r\rdata: b\r\r").0, ["a", "b"]);
        assert_eq!(all(": a comment\nevent: ping\ndata: x\n\ndata: a\n\n").0, ["a"]);
        assert_eq!(all("data: a\n\ndata: cut").0, ["a"], "an unfinished event is none");
        assert_eq!(all("other: x\ndata\n\n").0, Vec::<String>::new());
        let second = Some(Duration::from_secs(1));
        assert_eq!(all("id: 7\nretry: 1000\ndata:\n\nid: 8\n"), (vec![], Some("7".into()), second));
    }

    #[test]
    fn an_event_without_end_is_given_up() {
        let deadline = Deadline::within(Duration::from_secs(600));
        for unit in ["data: x", "data: x\n"] {
            let mut events =
                Events::new(io::Cursor::new(unit.repeat(1 << 20)).chain(io::repeat(b'x')));
            let error = events.next(deadline).expect_err("too long");
            assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        }
        let over = Deadline::within(Duration::ZERO);
        let error = Events::new(io::repeat(b'\n')).next(over).expect_err("late");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
