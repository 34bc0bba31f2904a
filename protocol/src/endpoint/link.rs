//! What both ends of a link share: the writer of the control stream and the first failure.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use quinn::{Connection, SendStream};
use tokio::sync::mpsc;

use super::{
    close::{CloseCode, LinkError, close},
    stream::{FrameReader, write_error},
};
use crate::{
    WireError,
    frame::{Frame, FrameError},
    session::Violation,
};

/// Control frames that wait to be written.
pub(super) const WRITE_QUEUE: usize = 256;
/// Control frames that wait to be received.
pub(super) const CONTROL_QUEUE: usize = 64;

/// The connection, and why it ended. The first failure counts; later ones follow from it.
#[derive(Clone)]
pub(super) struct Line {
    pub(super) connection: Connection,
    failure: Arc<OnceLock<LinkError>>,
}

impl Line {
    pub(super) fn new(connection: Connection) -> Self {
        Self { connection, failure: Arc::default() }
    }

    /// Records a failure. A violation also closes the connection, telling the peer why.
    pub(super) fn fail(&self, error: LinkError) {
        let error = self.failure.get_or_init(|| error);
        if let LinkError::Violation(violation) = error {
            close(&self.connection, CloseCode::Violation, &violation.to_string());
        }
    }

    /// The recorded failure, else the connection's own.
    pub(super) fn failure(&self) -> LinkError {
        let from_connection = || self.connection.close_reason().map(LinkError::from);
        self.failure.get().cloned().or_else(from_connection).unwrap_or(LinkError::Local)
    }
}

/// Writes queued control frames until the queue or the connection ends.
pub(super) async fn write_control(
    line: Line,
    mut stream: SendStream,
    mut queue: mpsc::Receiver<Bytes>,
) {
    while let Some(frame) = queue.recv().await {
        if let Err(error) = stream.write_chunk(frame).await {
            line.fail(write_error(error));
            return;
        }
    }
}

/// Passes control frames on until the stream or the connection ends.
pub(super) async fn read_control(line: Line, mut reader: FrameReader, frames: mpsc::Sender<Frame>) {
    loop {
        let error = match reader.next().await {
            Ok(Some(frame)) => match frames.send(frame).await {
                Ok(()) => continue,
                Err(_) => return,
            },
            Ok(None) => Violation::Stream("the control stream ended").into(),
            Err(error) => error,
        };
        line.fail(error);
        return;
    }
}

/// A message over its frame's cap, as an error about the message.
pub(super) fn too_long(error: FrameError) -> LinkError {
    LinkError::Unsendable(WireError {
        message: "message",
        field: "body",
        problem: error.to_string(),
    })
}
