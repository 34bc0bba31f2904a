use protocol::{Digest, NoiseKey, PolicyDigest, Sampling, Split, Task};

use super::*;

pub(super) fn order(generations: u32) -> GroupOrder {
    GroupOrder {
        task: Task { id: "t".into(), prompt: "p".into(), fields: "{}".into(), split: Split::Train },
        seed: 7,
        policy: PolicyDigest(Digest::of(b"policy")),
        sampling: Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
        generations,
        deadline_ms: 100,
    }
}

fn run() -> RunId {
    RunId(Digest::of(b"run"))
}

fn actor(name: &str) -> ActorId {
    ActorId(Digest::of(name.as_bytes()))
}

fn episode(name: &str) -> EpisodeId {
    EpisodeId(Digest::of(name.as_bytes()))
}

fn lease(group: u64, generation: u32) -> LeaseId {
    LeaseId { group, generation }
}

fn ids(leases: &[Lease]) -> Vec<(u64, u32, u32)> {
    leases.iter().map(|lease| (lease.id.group, lease.id.generation, lease.attempt)).collect()
}

/// A book with groups 0 and 1 of `generations` rollouts.
fn book(generations: u32) -> LeaseBook {
    let mut book = LeaseBook::new(run(), 3);
    for group in 0..2 {
        book.open(group, order(generations)).expect("new");
    }
    book
}

#[track_caller]
fn check(book: &LeaseBook) {
    let c = book.counts();
    assert_eq!(c.granted, c.submitted + c.failed + c.expired + book.outstanding() as u64, "{c:?}");
    assert!(c.received >= c.accepted + c.rejected, "{c:?}");
}

#[test]
fn leases_are_granted_oldest_group_first_and_a_group_together() {
    let mut book = book(3);
    let first = book.grant(actor("a"), 0, 4);
    assert_eq!(ids(&first), [(0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 0)]);
    assert_eq!(ids(&book.grant(actor("b"), 0, 9)), [(1, 1, 0), (1, 2, 0)]);
    assert_eq!((book.waiting(), book.outstanding()), (0, 6));
    let noise: Vec<NoiseKey> = first.iter().map(|lease| lease.noise_key).collect();
    assert_eq!(noise[1], NoiseKey::derive(&run(), lease(0, 1)));
    check(&book);
}

#[test]
fn an_expired_lease_is_granted_again_under_its_id_with_the_next_attempt() {
    let mut book = book(1);
    book.grant(actor("a"), 0, 1);
    assert_eq!((book.next_deadline(), book.expire(99).len()), (Some(100), 0));
    let over = book.expire(100);
    assert_eq!(over, [(actor("a"), LeaseAttempt { id: lease(0, 0), attempt: 0 })]);
    assert_eq!(ids(&book.grant(actor("b"), 100, 1)), [(0, 0, 1)]);
    check(&book);
}

#[test]
fn an_answer_counts_once() {
    let mut book = book(1);
    book.grant(actor("a"), 0, 1);
    let at = lease(0, 0);
    assert_eq!(book.submit(actor("a"), at, episode("x")), Submission::First);
    assert_eq!(book.submit(actor("a"), at, episode("x")), Submission::Duplicate);
    assert!(book.accept(at) && !book.accept(at));
    assert_eq!(book.submit(actor("a"), at, episode("x")), Submission::Duplicate);
    let done = book.take_complete().expect("complete");
    assert_eq!((done.group, done.episodes), (0, vec![episode("x")]));
    assert_eq!(book.submit(actor("a"), at, episode("x")), Submission::Duplicate, "even much later");
    let counts = book.counts();
    assert_eq!(
        (counts.received, counts.accepted, counts.duplicates, counts.submitted),
        (1, 1, 3, 1)
    );
    check(&book);
}

#[test]
fn the_best_of_several_answers_cannot_be_chosen() {
    let mut book = book(1);
    book.grant(actor("a"), 0, 1);
    let at = lease(0, 0);
    book.submit(actor("a"), at, episode("x"));
    let second = Submission::Equivocation { first: episode("x") };
    assert_eq!(book.submit(actor("a"), at, episode("y")), second);
    book.accept(at);
    book.take_complete();
    assert_eq!(book.submit(actor("a"), at, episode("z")), second);
    assert_eq!(book.counts().equivocations, 2);
    check(&book);
}

#[test]
fn answers_from_actors_that_were_not_asked_do_not_count() {
    let mut book = book(1);
    book.grant(actor("a"), 0, 1);
    assert_eq!(book.submit(actor("b"), lease(0, 0), episode("x")), Submission::NotGranted);
    assert_eq!(book.submit(actor("a"), lease(1, 0), episode("x")), Submission::NotGranted);
    assert_eq!(book.submit(actor("a"), lease(7, 0), episode("x")), Submission::Unknown);
    assert_eq!(book.submit(actor("a"), lease(0, 1), episode("x")), Submission::Unknown);
    assert_eq!(book.counts().received, 0);
    assert_eq!((book.waiting(), book.outstanding()), (1, 1), "nothing was lost by it");
    check(&book);
}

#[test]
fn the_first_answer_counts_even_from_an_expired_grant_and_the_second_is_late() {
    let mut book = book(1);
    let at = lease(0, 0);
    book.grant(actor("a"), 0, 1);
    book.expire(100);
    book.grant(actor("b"), 100, 1);
    assert_eq!(book.submit(actor("a"), at, episode("x")), Submission::First);
    assert_eq!(book.outstanding(), 1, "b still plays it");
    check(&book);
    assert_eq!(book.submit(actor("b"), at, episode("y")), Submission::Late);
    assert_eq!(book.outstanding(), 0);
    check(&book);
    assert_eq!(book.counts().expired, 1);
}

#[test]
fn a_group_completed_by_late_answers_revokes_what_is_still_played() {
    let mut book = book(1);
    book.grant(actor("a"), 0, 1);
    book.expire(100);
    book.grant(actor("b"), 100, 1);
    book.submit(actor("a"), lease(0, 0), episode("x"));
    book.accept(lease(0, 0));
    let done = book.take_complete().expect("complete");
    assert_eq!(done.revoke, [(actor("b"), LeaseAttempt { id: lease(0, 0), attempt: 1 })]);
    assert_eq!(book.submit(actor("b"), lease(0, 0), episode("y")), Submission::Late);
    check(&book);
}

#[test]
fn a_rejected_answer_reissues_the_lease_and_cannot_come_back() {
    let mut book = book(1);
    let at = lease(0, 0);
    book.grant(actor("a"), 0, 1);
    book.submit(actor("a"), at, episode("x"));
    assert!(book.reject(at) && !book.reject(at));
    let unasked = Submission::Equivocation { first: episode("x") };
    assert_eq!(book.submit(actor("a"), at, episode("y")), unasked, "not asked again");
    assert_eq!(ids(&book.grant(actor("a"), 0, 1)), [(0, 0, 1)]);
    assert_eq!(book.submit(actor("a"), at, episode("x")), Submission::Duplicate);
    assert_eq!(ids(&book.grant(actor("a"), 0, 1)), [(0, 0, 2)], "its last attempt");
    assert_eq!(book.submit(actor("a"), at, episode("z")), Submission::First);
    check(&book);
    assert!(book.reject(at));
    let dropped = book.take_lost().expect("no attempts left");
    assert_eq!((dropped.group, dropped.unused.len()), (0, 0));
    assert_eq!(book.counts().groups_dropped, 1);
    check(&book);
}

#[test]
fn a_group_that_cannot_be_completed_is_dropped_whole() {
    let mut book = book(3);
    book.grant(actor("a"), 0, 3);
    book.submit(actor("a"), lease(0, 0), episode("x"));
    book.accept(lease(0, 0));
    for attempt in 0..3 {
        assert!(book.fail(actor("a"), LeaseAttempt { id: lease(0, 1), attempt }));
        assert!(!book.fail(actor("a"), LeaseAttempt { id: lease(0, 1), attempt }), "ended already");
        if attempt < 2 {
            assert_eq!(ids(&book.grant(actor("a"), 0, 1)), [(0, 1, attempt + 1)]);
        }
    }
    assert_eq!(book.standing(lease(0, 2)), book.standing(lease(0, 2)));
    let dropped = book.take_lost().expect("lost");
    assert_eq!(dropped.unused, [episode("x")]);
    assert_eq!(dropped.revoke, [(actor("a"), LeaseAttempt { id: lease(0, 2), attempt: 0 })]);
    assert_eq!(book.submit(actor("a"), lease(0, 2), episode("y")), Submission::Late);
    assert_eq!(book.take_lost(), None);
    check(&book);
}

#[test]
fn an_actor_that_leaves_gives_everything_back() {
    let mut book = book(2);
    book.grant(actor("a"), 0, 3);
    book.grant(actor("b"), 0, 1);
    assert_eq!(book.release(actor("a")).len(), 3);
    assert_eq!((book.waiting(), book.outstanding(), book.counts().failed), (3, 1, 3));
    assert_eq!(ids(&book.grant(actor("b"), 0, 9)), [(0, 0, 1), (0, 1, 1), (1, 0, 1)]);
    check(&book);
}

#[test]
fn standing_tells_the_audit_what_a_lease_was() {
    let mut book = book(1);
    let at = lease(0, 0);
    let granted = book.grant(actor("a"), 0, 1).remove(0);
    assert_eq!(book.standing(at), Standing::Open(Box::new(granted.clone())));
    book.submit(actor("a"), at, episode("x"));
    assert_eq!(book.standing(at), Standing::Open(Box::new(granted)), "its audit is not over");
    book.accept(at);
    assert_eq!(book.standing(at), Standing::Spent);
    book.take_complete();
    assert_eq!(book.standing(at), Standing::Spent);
    assert_eq!(book.standing(lease(9, 0)), Standing::Unknown);
}

#[test]
fn groups_have_numbers_of_their_own_and_at_least_one_rollout() {
    let mut book = book(1);
    assert_eq!(book.open(0, order(1)), Err(LeaseError::Reopened(0)));
    assert_eq!(book.open(5, order(0)), Err(LeaseError::Empty(5)));
    book.drop_group(0);
    assert_eq!(book.open(0, order(1)), Err(LeaseError::Reopened(0)));
}

#[test]
fn any_sequence_of_events_keeps_the_books() {
    let mut state = 1_u64;
    let mut draw = |n: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    for round in 0..200 {
        let mut book = book(3);
        for now in 0..60 {
            let who = actor(["a", "b", "c"][usize::try_from(draw(3)).expect("small")]);
            let at = lease(draw(2), u32::try_from(draw(3)).expect("small"));
            match draw(8) {
                0 | 1 => drop(book.grant(who, now * 10, 2)),
                2 => drop(book.expire(now * 10)),
                3 => drop(book.release(who)),
                4 | 5 => drop(book.submit(who, at, episode(&format!("{round}/{}", draw(4))))),
                6 => drop(book.accept(at)),
                _ => drop(book.reject(at)),
            }
            check(&book);
            while book.take_complete().is_some() || book.take_lost().is_some() {
                check(&book);
            }
        }
    }
}

#[test]
fn a_taken_group_can_be_opened_again_until_it_is_confirmed() {
    let mut book = book(2);
    book.grant(actor("a"), 0, 2);
    for generation in 0..2 {
        let at = lease(0, generation);
        book.submit(actor("a"), at, episode(&format!("x{generation}")));
        assert!(book.accept(at));
    }
    let taken = book.take_complete().expect("complete");
    assert_eq!(taken.actors, [actor("a"), actor("a")]);
    assert_eq!(book.standing(lease(0, 1)), Standing::Spent);
    assert_eq!(book.open(0, order(1)), Err(LeaseError::Reopened(0)));
    assert_eq!(book.submit(actor("a"), lease(0, 1), episode("x1")), Submission::Duplicate);
    assert_eq!((book.open_groups(), book.take_complete()), (1, None), "taken once");

    assert_eq!(book.reopen(0, &[1, 7]), 1, "generation 7 is not there");
    assert_eq!((book.counts().accepted, book.counts().rejected), (1, 1));
    assert_eq!(ids(&book.grant(actor("b"), 0, 1)), [(0, 1, 1)]);
    let again = book.submit(actor("a"), lease(0, 1), episode("x1"));
    assert_eq!(again, Submission::Duplicate, "what was refused stays refused");
    assert_eq!(book.submit(actor("b"), lease(0, 1), episode("y1")), Submission::First);
    assert!(book.accept(lease(0, 1)));
    let taken = book.take_complete().expect("complete again");
    assert_eq!(taken.episodes, [episode("x0"), episode("y1")]);
    assert!(book.confirm(0) && !book.confirm(0));
    assert_eq!(book.reopen(0, &[0]), 0, "over is over");
    assert_eq!(book.counts().groups_completed, 1);
    check(&book);
}
