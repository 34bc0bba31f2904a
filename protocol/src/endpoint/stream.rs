//! Frames over QUIC streams: bounded in memory and in time.

use std::time::Duration;

use bytes::Bytes;
use quinn::{ReadError, RecvStream, SendStream, WriteError};
use tokio::time::{Instant, timeout_at};

use super::close::LinkError;
use crate::{
    frame::{Channel, Decoded, Decoder, Frame, FrameError, Header, Kind},
    session::Violation,
};

/// What one read takes at most.
const READ: usize = 64 << 10;

/// Reads frames from one direction of a stream.
pub(super) struct FrameReader {
    stream: RecvStream,
    decoder: Decoder,
    rest: Bytes,
    patience: Duration,
}

impl FrameReader {
    pub(super) fn new(stream: RecvStream, channel: Channel, patience: Duration) -> Self {
        Self { stream, decoder: Decoder::new(channel), rest: Bytes::new(), patience }
    }

    /// The next frame; `None` where the stream ended between frames. The clock starts with a
    /// frame's first byte, so a quiet stream may wait as long as it likes.
    pub(super) async fn next(&mut self) -> Result<Option<Frame>, LinkError> {
        let mut deadline = None;
        loop {
            if !self.rest.is_empty() {
                match self.decoder.feed(&self.rest).map_err(Violation::from)? {
                    Decoded::Complete { frame, consumed } => {
                        self.rest = self.rest.split_off(consumed);
                        return Ok(Some(frame));
                    }
                    Decoded::Incomplete { .. } => self.rest.clear(),
                }
                deadline.get_or_insert_with(|| Instant::now() + self.patience);
            }
            let read = self.stream.read_chunk(READ, true);
            let chunk = match deadline {
                None => read.await,
                Some(at) => timeout_at(at, read)
                    .await
                    .map_err(|_| Violation::Slow(self.patience.as_secs()))?,
            };
            match chunk.map_err(read_error)? {
                Some(chunk) => self.rest = chunk.bytes,
                None if self.decoder.is_idle() => return Ok(None),
                None => return Err(Violation::Stream("it ended inside a frame").into()),
            }
        }
    }

    /// The only frame of a stream that carries one.
    pub(super) async fn only(mut self) -> Result<Frame, LinkError> {
        let deadline = Instant::now() + self.patience;
        let seconds = self.patience.as_secs();
        let slow = |_| LinkError::from(Violation::Slow(seconds));
        let frame = timeout_at(deadline, self.next()).await.map_err(slow)??;
        let frame = frame.ok_or(Violation::Stream("it ended before its frame"))?;
        match timeout_at(deadline, self.next()).await.map_err(slow)?? {
            None => Ok(frame),
            Some(_) => Err(Violation::Stream("it goes on after its one frame").into()),
        }
    }
}

/// Writes one frame whose body is at hand.
pub(super) async fn write_frame(
    stream: &mut SendStream,
    header: Header,
    body: Bytes,
) -> Result<(), LinkError> {
    let head = Bytes::copy_from_slice(&header.to_bytes());
    stream.write_all_chunks(&mut [head, body]).await.map_err(write_error)
}

/// A small frame, header and body in one piece.
pub(super) fn pack(kind: Kind, body: &[u8]) -> Result<Bytes, FrameError> {
    crate::frame::encode(kind, body).map(Bytes::from)
}

pub(super) fn read_error(error: ReadError) -> LinkError {
    match error {
        ReadError::ConnectionLost(lost) => lost.into(),
        ReadError::Reset(_) => Violation::Reset.into(),
        other => LinkError::Transport(other.to_string()),
    }
}

pub(super) fn write_error(error: WriteError) -> LinkError {
    match error {
        WriteError::ConnectionLost(lost) => lost.into(),
        WriteError::Stopped(_) => Violation::Stream("the peer stopped reading it").into(),
        other => LinkError::Transport(other.to_string()),
    }
}
