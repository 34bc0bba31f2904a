//! Rung 1: the bytes are an episode within every limit, and hash to the id that was announced.

use protocol::{Episode, EpisodeId};

use super::Reason;

pub(super) fn check(id: EpisodeId, body: &[u8]) -> Result<Episode, Reason> {
    let found = EpisodeId::of_body(body);
    if found != id {
        return Err(Reason::IdMismatch { found: found.0 });
    }
    Episode::decode(body).map_err(|error| Reason::BadFrame { problem: error.to_string() })
}
