//! What hostile bytes can make a reader allocate, counted by the allocator itself. One test only:
//! the count is of the whole process.

mod support;

use std::alloc::System;

use protocol::{
    Digest,
    frame::{Decoder, Header, Kind},
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use support::{Message, frame, samples};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// What serde reserves for a column on a claimed length alone, at most.
const RESERVE: usize = 1 << 20;

/// Everything that `work` asks of the allocator, freed or not.
fn allocated(work: impl FnOnce()) -> usize {
    let region = Region::new(ALLOCATOR);
    work();
    let change = region.change();
    change.bytes_allocated
}

/// Reads a body and checks what that costs: one reserve and a small multiple of what is there, which covers columns
/// that grow by doubling and the conversion to domain types.
fn read(kind: Kind, body: &[u8], what: &str) {
    let frame = frame(kind, body);
    let cost = allocated(|| {
        if kind == Kind::Episode {
            let _ = protocol::Episode::decode(&frame.body);
        } else {
            let _ = Message::decode(frame);
        }
    });
    let limit = RESERVE + 4096 + 4 * body.len();
    assert!(cost <= limit, "{kind:?}, {what}: {cost} bytes for a body of {}", body.len());
}

#[test]
fn claimed_lengths_and_cheap_columns_cost_no_more_than_a_small_multiple_of_the_body() {
    for (_, message) in samples() {
        let (kind, body) = message.encode().expect("sound");
        for at in 0..body.len().saturating_sub(7) {
            for claim in [1_u64 << 16, 1 << 24, 1 << 32, 1 << 60, u64::MAX] {
                let mut lying = body.clone();
                lying[at..at + 8].copy_from_slice(&claim.to_le_bytes());
                read(kind, &lying, &format!("{claim} at {at}"));
            }
        }
        // Wherever a length stands: as many of the cheapest entries as the frame takes.
        let entries = kind.cap().min(2 << 20) / 8;
        for at in (0..body.len().saturating_sub(7)).step_by(if body.len() > 400 { 3 } else { 1 }) {
            let mut wide = body[..at].to_vec();
            wide.extend_from_slice(&(entries as u64).to_le_bytes());
            wide.resize(at + 8 + entries * 8, 0);
            read(kind, &wide, &format!("{entries} empty entries at {at}"));
        }
    }
    for kind in Kind::ALL {
        let header = Header { kind, len: kind.cap(), digest: Digest([0; 32]) };
        let mut decoder = Decoder::new(kind.channel());
        let cost = allocated(|| {
            decoder.feed(&header.to_bytes()).expect("a header");
        });
        assert!(cost <= 4096, "{kind:?}: a header alone cost {cost} bytes");
        let cost = allocated(|| {
            for _ in 0..64.min(kind.cap() / 1024) {
                let _ = decoder.feed(&[0; 1024]);
            }
        });
        assert!(cost <= 4 * 64 * 1024, "{kind:?}: 64 KiB of body cost {cost} bytes");
    }
}
