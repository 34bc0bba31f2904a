//! Rung 1: the bytes are an episode within every limit, and hash to the id that was announced; its
//! images are those that it says it showed, by the digests of their pixels.

use protocol::{Episode, EpisodeId};

use super::Reason;

pub(super) fn check(id: EpisodeId, body: &[u8]) -> Result<Episode, Reason> {
    let found = EpisodeId::of_body(body);
    if found != id {
        return Err(Reason::IdMismatch { found: found.0 });
    }
    Episode::decode(body).map_err(|error| Reason::BadFrame { problem: error.to_string() })
}

/// Every image is there once, in the order in which it is shown, and has the address that it is shown
/// by.
pub(super) fn check_images(episode: &Episode) -> Result<(), Reason> {
    episode.shown_images().map(|_| ()).map_err(Reason::Images)
}
