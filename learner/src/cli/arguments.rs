//! Arguments that several commands share: ranks, and the network side of a run.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Args;
use policy::device::DeviceChoice;
use protocol::Digest;
use terminal::{Audience, Failure, Interrupt, metrics_address};

use super::carry_out::audience;
use crate::{
    ranks::{Backend, Place, RankOptions, Ranks, Role},
    train::online::TrainOptions,
};

/// Ranks of one run, one for each device. Under torchrun, Slurm, MPI or Kubernetes they are found by
/// themselves.
#[derive(Debug, Args)]
#[command(next_help_heading = "Ranks")]
pub(super) struct RankArguments {
    /// Start so many ranks on this machine, one for each device.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    nproc_per_node: Option<u16>,
    /// What sums gradients over ranks: auto (NCCL between CUDA devices where it was built in), tcp, nccl.
    #[arg(long, default_value = "auto")]
    collective: Backend,
    /// Seconds that ranks have to find each other.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    rendezvous_seconds: u64,
    /// Seconds that ranks wait for another in one step before they end the run.
    #[arg(long, default_value_t = 1800, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    rank_timeout_seconds: u64,
}

/// This process as one rank of a run.
pub(super) struct Rank {
    options: RankOptions,
    place: Place,
    pub(super) device: DeviceChoice,
}

impl RankArguments {
    /// Which rank this is; nothing where it has started the ranks and they have ended well.
    pub(super) fn rank(
        self,
        interrupt: &Interrupt,
        device: DeviceChoice,
    ) -> Result<Option<Rank>, Failure> {
        let options = RankOptions {
            nproc_per_node: self.nproc_per_node.map(usize::from),
            collective: self.collective,
            meeting: Duration::from_secs(self.rendezvous_seconds),
            timeout: Duration::from_secs(self.rank_timeout_seconds),
        };
        Ok(match options.role(interrupt)? {
            Role::Parent => None,
            Role::Rank(place) => {
                let device = device.of_rank(place.local_rank);
                Some(Rank { options, place, device })
            }
        })
    }
}

impl Rank {
    /// Only rank 0 speaks.
    pub(super) fn audience(&self, json: bool) -> Audience {
        if self.place.rank == 0 { audience(json) } else { Audience::Nobody }
    }

    pub(super) fn meet(&self, run: Digest) -> Result<Ranks, Failure> {
        self.options.connect(&self.place, run, self.device)
    }
}

/// Where to compute, where to listen, and which actors to start.
#[derive(Debug, Args)]
pub(super) struct NetworkArguments {
    /// auto, cpu or cuda:N.
    #[arg(long, default_value = "auto")]
    pub(super) device: DeviceChoice,
    /// Address to listen on for actors; port 0 takes any free one.
    #[arg(long, default_value = "127.0.0.1:0", value_parser = listen_address)]
    listen: SocketAddr,
    /// Host name or address in the join string: how actors reach this machine.
    #[arg(long)]
    host: Option<String>,
    /// Actor processes to start on this machine. Where no port is given to listen on, evaluations and
    /// calibrations start one.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=256))]
    local_actors: u16,
    /// Devices of the local actors, round robin; the learner's own by default.
    #[arg(long, value_delimiter = ',')]
    actor_devices: Vec<String>,
    /// Episodes in flight at each local actor.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    actor_slots: u32,
    /// The actor program; the one beside this program by default.
    #[arg(long)]
    actor_program: Option<PathBuf>,
    /// Directory that keeps the learner's certificate, the join secret, the join string (file `join`) and
    /// the ids of actors that are shut out (file `revoked`); see `learner token`. Without it the learner is
    /// another one at each start. With it and a fixed port in --listen, actors find a learner again that was
    /// restarted. It is no part of the run's directory, which is there to be shared.
    #[arg(long)]
    identity: Option<PathBuf>,
    /// Actors that the learner sends adapters to itself, and that each actor started with `--relay` passes
    /// them on to, once more than so many are connected and some of them relay; 0: the learner sends
    /// everything.
    #[arg(long, value_name = "K", default_value_t = 4, value_parser = clap::value_parser!(u16).range(0..=64))]
    relay_fanout: u16,
    /// Seconds that an actor has for an episode before its lease goes to another.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    lease_seconds: u64,
    /// Serve metrics in the text format of OpenMetrics at http://ADDR/metrics: a port of 127.0.0.1, or
    /// ADDRESS:PORT.
    #[arg(long, value_name = "ADDR", value_parser = metrics_address)]
    metrics_listen: Option<SocketAddr>,
}

fn listen_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "give ADDRESS:PORT, as 0.0.0.0:7171 or [::]:7171".into())
}

impl NetworkArguments {
    pub(super) fn options(self) -> TrainOptions {
        let host = self.host.unwrap_or_else(|| self.listen.ip().to_string());
        TrainOptions {
            device: self.device,
            listen: self.listen,
            host,
            local_actors: usize::from(self.local_actors),
            actor_devices: self.actor_devices,
            actor_slots: self.actor_slots,
            actor_program: self.actor_program,
            identity: self.identity,
            relay_fanout: usize::from(self.relay_fanout),
            lease_ms: self.lease_seconds.saturating_mul(1000),
            resume: false,
            tensorboard: false,
            metrics_listen: self.metrics_listen,
        }
    }
}
