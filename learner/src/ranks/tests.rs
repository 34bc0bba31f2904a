use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use protocol::Digest;

use super::*;

const SECONDS: fn(u64) -> Duration = Duration::from_secs;

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn place(rank: usize, world: usize, port: u16) -> Place {
    Place {
        launcher: Some(Launcher::Rollcall),
        rank,
        world,
        local_rank: rank,
        one_machine: true,
        host: "127.0.0.1".into(),
        port,
        job: "test".into(),
    }
}

fn meeting(rank: usize, world: usize, port: u16) -> Meeting {
    let place = place(rank, world, port);
    Meeting {
        secret: RankSecret::choose(&place, None).unwrap(),
        place,
        run: Digest::of(b"run"),
        deadline: SECONDS(20),
        timeout: SECONDS(20),
        on_failure: Box::new(|_| ()),
    }
}

/// Runs `work` on every rank of a new collective; what each gave, in order.
fn on_ranks<T: Send + 'static>(
    world: usize,
    change: impl Fn(&mut Meeting) + Send + Sync + 'static,
    work: impl Fn(&mut dyn Collective) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let (port, change, work) = (free_port(), Arc::new(change), Arc::new(work));
    let ranks = (0..world).map(|rank| {
        let (change, work) = (change.clone(), work.clone());
        thread::spawn(move || {
            let mut meeting = meeting(rank, world, port);
            change(&mut meeting);
            let mut ranks = meet(meeting).expect("all ranks are there");
            work(&mut *ranks)
        })
    });
    let ranks: Vec<_> = ranks.collect();
    ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
}

/// Values whose sum depends on the order of adding.
fn value(rank: usize, at: usize) -> f32 {
    ((rank * 7919 + at * 104_729) % 1_000) as f32 * 10f32.powi((at % 9) as i32 - 4) - 300.0
}

#[test]
fn sums_are_formed_in_the_order_of_the_ranks_with_the_same_bits_everywhere() {
    for world in 1..=4 {
        let sums = on_ranks(
            world,
            |_| (),
            |ranks| {
                let mut values: Vec<f32> = (0..10_007).map(|at| value(ranks.rank(), at)).collect();
                ranks.all_reduce(&mut values).unwrap();
                let mut wide = vec![ranks.rank() as f64 + 0.25; 3];
                ranks.all_reduce_wide(&mut wide).unwrap();
                ranks.finish().unwrap();
                (values, wide)
            },
        );
        let expected: Vec<f32> = (0..10_007)
            .map(|at| (1..world).fold(value(0, at), |sum, rank| sum + value(rank, at)))
            .collect();
        let wide = (0..world).map(|rank| rank as f64 + 0.25).sum::<f64>();
        for (values, sums) in sums {
            assert!(values.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
            assert_eq!(sums, vec![wide; 3]);
        }
    }
}

#[test]
fn bytes_reach_everybody_from_rank_0_and_from_each() {
    let seen = on_ranks(
        3,
        |_| (),
        |ranks| {
            let rank = ranks.rank();
            let mut plan = if rank == 0 { b"the plan".repeat(100_000) } else { vec![9] };
            ranks.broadcast(&mut plan).unwrap();
            let all = ranks.all_gather(&vec![rank as u8; rank * 1000]).unwrap();
            ranks.barrier().unwrap();
            agree(ranks, "plan", Digest::of(&plan)).unwrap();
            ranks.finish().unwrap();
            (Digest::of(&plan), all)
        },
    );
    let all: Vec<Vec<u8>> = (0..3).map(|rank| vec![rank as u8; rank * 1000]).collect();
    for (plan, gathered) in seen {
        assert_eq!(plan, Digest::of(&b"the plan".repeat(100_000)));
        assert_eq!(gathered, all);
    }
}

#[test]
fn ranks_that_hold_different_weights_are_named() {
    let errors = on_ranks(
        3,
        |_| (),
        |ranks| {
            let digest = Digest::of(if ranks.rank() == 2 { b"other" } else { b"equal" });
            agree(ranks, "adapter", digest).unwrap_err().to_string()
        },
    );
    assert!(
        errors.iter().all(|error| error.contains("rank 2 holds another adapter")),
        "{errors:?}"
    );
}

#[test]
fn a_rank_that_ends_ends_all_and_is_named_even_while_nobody_waits_for_it() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let heard = told.clone();
    let start = Instant::now();
    let errors = on_ranks(
        3,
        move |meeting| {
            let (heard, rank) = (heard.clone(), meeting.place.rank);
            meeting.on_failure =
                Box::new(move |error| heard.lock().unwrap().push((rank, error.to_string())));
        },
        |ranks| {
            if ranks.rank() == 1 {
                ranks.abort("its disk is full");
                return String::new();
            }
            // They learn of it while they compute.
            thread::sleep(Duration::from_millis(300));
            ranks.barrier().unwrap_err().to_string()
        },
    );
    assert!(start.elapsed() < SECONDS(10));
    assert_eq!(errors[0], "rank 1: its disk is full");
    assert_eq!(errors[2], "rank 1: its disk is full");
    let told = told.lock().unwrap();
    assert_eq!(told.len(), 3, "{told:?}");
}

#[test]
fn a_lost_connection_is_a_rank_that_is_gone() {
    let errors = on_ranks(
        3,
        |_| (),
        |ranks| {
            if ranks.rank() == 2 {
                return String::new();
            }
            ranks.barrier().unwrap_err().to_string()
        },
    );
    for error in &errors[..2] {
        assert!(error.contains("rank 2") && !error.contains('\n'), "{error}");
    }
}

#[test]
fn a_rank_that_hangs_is_named_on_every_rank_within_the_deadline() {
    let start = Instant::now();
    let errors = on_ranks(
        3,
        |meeting| meeting.timeout = SECONDS(1),
        |ranks| {
            if ranks.rank() == 1 {
                thread::sleep(SECONDS(4));
                return String::new();
            }
            ranks.all_reduce(&mut [1.0]).unwrap_err().to_string()
        },
    );
    assert!(start.elapsed() < SECONDS(9));
    for rank in [0, 2] {
        assert!(errors[rank].contains("rank 1 did not reach sum 1 within 1 s"), "{errors:?}");
    }
}

#[test]
fn ranks_at_different_operations_are_told_so() {
    let errors = on_ranks(
        2,
        |_| (),
        |ranks| {
            let result = match ranks.rank() {
                0 => ranks.all_reduce(&mut [1.0]),
                _ => ranks.barrier(),
            };
            result.unwrap_err().to_string()
        },
    );
    assert!(errors[0].contains("rank 1 is at gathering 1 where rank 0 is at sum 1"), "{errors:?}");
    let errors = on_ranks(
        2,
        |_| (),
        |ranks| ranks.all_reduce(&mut vec![1.0; 1 + ranks.rank()]).unwrap_err().to_string(),
    );
    assert!(errors[0].contains("sum 1 of 2 values"), "{errors:?}");
}

#[test]
fn missing_ranks_are_named_at_the_deadline_with_what_happened_meanwhile() {
    let port = free_port();
    let other = thread::spawn(move || {
        let mut it = meeting(2, 4, port);
        it.secret = RankSecret::choose(&it.place, Some("another secret!!".into())).unwrap();
        meet(it).err().unwrap().to_string()
    });
    let mut it = meeting(0, 4, port);
    it.deadline = SECONDS(2);
    let root = thread::spawn(move || meet(it).err().unwrap().to_string());
    let mut third = meeting(3, 4, port);
    third.deadline = SECONDS(2);
    // It is let in, and learns from the end of its connection that the run has not begun.
    let third = thread::spawn(move || meet(third).map(|mut ranks| ranks.barrier()));
    let refused = other.join().unwrap();
    assert!(
        refused.contains("rank 2 was refused") && refused.contains("another secret"),
        "{refused}"
    );
    let error = root.join().unwrap();
    assert!(
        error.starts_with("ranks 1, 2 of 4 did not come within 2 s (1 held another secret)"),
        "{error}"
    );
    assert!(third.join().unwrap().is_ok_and(|barrier| barrier.is_err()));
}

#[test]
fn a_rank_without_a_rank_0_gives_up_at_its_deadline() {
    let mut it = meeting(1, 2, free_port());
    it.deadline = SECONDS(1);
    let error = meet(it).err().unwrap().to_string();
    assert!(error.contains("rank 1 found no rank 0 at 127.0.0.1:"), "{error}");
}

#[test]
fn a_port_in_use_is_said_with_its_remedy() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = meet(meeting(0, 2, listener.local_addr().unwrap().port())).err().unwrap();
    let error = error.to_string();
    assert!(error.contains("the port is in use; set ROLLCALL_RENDEZVOUS"), "{error}");
}

#[test]
fn ranks_of_another_recipe_and_ranks_that_come_twice_are_refused() {
    let port = free_port();
    let root = thread::spawn(move || meet(meeting(0, 3, port)).map(|mut ranks| ranks.finish()));
    let mut stranger = meeting(1, 3, port);
    stranger.run = Digest::of(b"another run");
    let error = meet(stranger).err().unwrap().to_string();
    assert!(error.contains("another recipe"), "{error}");
    let first = thread::spawn(move || meet(meeting(1, 3, port)).map(|mut ranks| ranks.finish()));
    thread::sleep(Duration::from_millis(300));
    let error = meet(meeting(1, 3, port)).err().unwrap().to_string();
    assert!(error.contains("another process with this rank"), "{error}");
    let last = meet(meeting(2, 3, port)).map(|mut ranks| ranks.finish());
    for result in [root.join().unwrap(), first.join().unwrap(), last] {
        result.unwrap().unwrap();
    }
}

#[test]
fn strangers_do_not_hold_up_the_meeting() {
    let port = free_port();
    let root = thread::spawn(move || meet(meeting(0, 2, port)).map(|mut ranks| ranks.finish()));
    let connect = || {
        let end = Instant::now() + SECONDS(5);
        loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => return stream,
                Err(_) if Instant::now() < end => thread::sleep(Duration::from_millis(10)),
                Err(e) => panic!("{e}"),
            }
        }
    };
    let silent: Vec<TcpStream> = (0..20).map(|_| connect()).collect();
    for junk in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 200], b"RCRANK01"] {
        connect().write_all(junk).unwrap();
    }
    // A good hello that is heard and said again proves nothing: the random number is another.
    let mut replayed = connect();
    replayed.read_exact(&mut [0; 24]).unwrap();
    let start = Instant::now();
    meet(meeting(1, 2, port)).unwrap().finish().unwrap();
    assert!(start.elapsed() < SECONDS(4));
    root.join().unwrap().unwrap().unwrap();
    drop(silent);
}

#[test]
fn every_item_is_on_exactly_one_rank() {
    for world in 1..6 {
        for len in 0..40 {
            let costs: Vec<usize> = (0..len).map(|i| (i * 37 + 11) % 23).collect();
            let mut seen = vec![0; len];
            let mut even = vec![0; len];
            for rank in 0..world {
                share(&costs, rank, world).into_iter().for_each(|item| seen[item] += 1);
                split_even(len, rank, world).for_each(|item| even[item] += 1);
            }
            assert!(seen.iter().chain(&even).all(|times| *times == 1));
        }
    }
    // The dearest is alone where it weighs as much as all others.
    let costs = [90, 10, 20, 30, 30];
    assert_eq!(share(&costs, 0, 2), [0]);
    assert_eq!(share(&costs, 1, 2), [1, 2, 3, 4]);
}

fn discovered(variables: &[(&str, &str)]) -> Result<Place, RankError> {
    Place::from_variables(&|name| {
        variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    })
}

#[test]
fn launchers_are_known_by_their_variables() {
    assert_eq!(discovered(&[]).unwrap(), Place::alone());
    let torchrun = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RUN_ID", "abc"),
    ];
    let place = discovered(&torchrun).unwrap();
    assert_eq!((place.rank, place.world, place.local_rank), (3, 4, 1));
    assert_eq!((place.host.as_str(), place.port, place.one_machine), ("node0", 29501, false));
    let slurm = [
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "16"),
        ("SLURM_STEP_NUM_TASKS", "8"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_JOB_ID", "4711"),
        ("SLURM_JOB_NODELIST", "gpu[03-05,9],login"),
        ("SLURM_NNODES", "4"),
        ("SLURM_STEP_ID", "0"),
    ];
    let place = discovered(&slurm).unwrap();
    assert_eq!((place.rank, place.world, place.local_rank), (5, 8, 1));
    assert_eq!((place.host.as_str(), place.port), ("gpu03", 29_400 + 711));
    // The batch script itself is no rank.
    assert_eq!(discovered(&slurm[..7]).unwrap(), Place::alone());
    let mpi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    assert_eq!(discovered(&mpi).unwrap().host, "127.0.0.1");
    assert!(discovered(&mpi[..3]).unwrap_err().to_string().contains("ROLLCALL_RENDEZVOUS"));
    let job = [
        ("JOB_COMPLETION_INDEX", "2"),
        ("ROLLCALL_WORLD_SIZE", "3"),
        ("ROLLCALL_RENDEZVOUS", "ranks-0.ranks:29400"),
    ];
    let place = discovered(&job).unwrap();
    assert_eq!((place.rank, place.world, place.host.as_str()), (2, 3, "ranks-0.ranks"));
    // An Indexed Job of actors, or of anything else.
    assert_eq!(discovered(&job[..1]).unwrap(), Place::alone());
    let group = [
        ("LWS_WORKER_INDEX", "1"),
        ("LWS_GROUP_SIZE", "2"),
        ("LWS_LEADER_ADDRESS", "leader.default"),
    ];
    assert_eq!(discovered(&group).unwrap().host, "leader.default");
}

#[test]
fn half_of_a_launchers_variables_and_nonsense_are_refused_by_name() {
    let error = discovered(&[("RANK", "0"), ("WORLD_SIZE", "2")]).unwrap_err().to_string();
    assert_eq!(
        error,
        "torchrun sets RANK but not LOCAL_RANK: start every rank through it, or unset RANK"
    );
    let own = |rank, world, meet| {
        discovered(&[
            ("ROLLCALL_RANK", rank),
            ("ROLLCALL_WORLD_SIZE", world),
            ("ROLLCALL_LOCAL_RANK", "0"),
            ("ROLLCALL_RENDEZVOUS", meet),
        ])
    };
    assert!(own("1", "2", "[::1]:400").unwrap().one_machine);
    for (rank, world, meet, says) in [
        ("x", "2", "h:1", "ROLLCALL_RANK=\"x\" is not a whole number"),
        ("-1", "2", "h:1", "ROLLCALL_RANK"),
        ("2", "2", "h:1", "is not below the number of ranks (2)"),
        ("0", "0", "h:1", "ROLLCALL_WORLD_SIZE=\"0\""),
        ("0", "99999", "h:1", "from 1 to 4096"),
        ("0", "2", "host", "is not HOST:PORT"),
        ("0", "2", ":70", "is not HOST:PORT"),
        ("0", "2", "h:0", "is not HOST:PORT"),
    ] {
        let error = own(rank, world, meet).unwrap_err().to_string();
        assert!(error.contains(says) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn ranks_on_several_machines_need_a_secret() {
    let far = Place { one_machine: false, ..place(0, 2, 1) };
    assert!(
        RankSecret::choose(&far, None).unwrap_err().to_string().contains("ROLLCALL_RANK_SECRET")
    );
    assert!(RankSecret::choose(&far, Some("short".into())).is_err());
    let secret = RankSecret::choose(&far, Some("long enough by far".into())).unwrap();
    assert_eq!(format!("{secret:?}"), "RankSecret(…)");
}
