//! Several ranks in one process.

use std::{net::TcpListener, sync::Arc, thread, time::Duration};

use learner::ranks::{Launcher, Meeting, Place, RankSecret, Ranks, meet};
use protocol::Digest;
use terminal::Failure;

/// Runs `work` as each rank of `world`, in threads that meet over TCP.
pub(crate) fn on_ranks<T: Send + 'static>(
    world: usize,
    work: impl Fn(Box<dyn FnOnce(Digest) -> Result<Ranks, Failure>>, usize) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    drop(listener);
    let work = Arc::new(work);
    let threads: Vec<_> = (0..world)
        .map(|rank| {
            let work = work.clone();
            thread::spawn(move || {
                let meet_as = move |run: Digest| {
                    let place = Place {
                        launcher: Some(Launcher::Rollcall),
                        rank,
                        world,
                        local_rank: rank,
                        one_machine: true,
                        host: "127.0.0.1".into(),
                        port,
                        job: "test".into(),
                    };
                    let meeting = Meeting {
                        secret: RankSecret::choose(&place, None).map_err(Failure::mistake)?,
                        place,
                        run,
                        deadline: Duration::from_secs(60),
                        timeout: Duration::from_secs(120),
                        on_failure: Box::new(|_| ()),
                    };
                    meet(meeting).map(Ranks::over).map_err(Failure::fault)
                };
                work(Box::new(meet_as), rank)
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
}
