//! Sums over NCCL: the values go to this rank's GPU, are added up there over NVLink or the network that
//! NCCL finds, and come back. Everything else, and noticing that a rank is gone, stays with TCP.

use std::sync::Arc;

use cudarc::{
    driver::{CudaContext, CudaStream},
    nccl::{Comm, Id, ReduceOp},
};

use super::{Collective, RankError};

/// Ranks with one CUDA device each.
pub struct NcclCollective {
    control: Box<dyn Collective>,
    comm: Comm,
    stream: Arc<CudaStream>,
}

// SAFETY: the communicator is used by whoever owns this value, one operation at a time; NCCL asks for
// no more (its communicators may be used from any thread, not from two at once).
#[allow(unsafe_code)]
unsafe impl Send for NcclCollective {}

fn device(error: impl std::fmt::Debug) -> RankError {
    RankError::Device(format!("{error:?}").chars().take(300).collect())
}

impl NcclCollective {
    /// Opens NCCL between ranks that have met, each with the CUDA device of this index.
    ///
    /// # Errors
    /// No NCCL library or device here, or a rank that fails meanwhile.
    pub fn over(mut control: Box<dyn Collective>, index: usize) -> Result<Self, RankError> {
        // SAFETY: it only tries to open a shared library by its well-known names.
        #[allow(unsafe_code)]
        if !unsafe { cudarc::nccl::sys::is_culib_present() } {
            let reason = "no NCCL (libnccl.so.2) on this machine; use --collective tcp";
            return Err(RankError::Device(reason.into()));
        }
        let context = CudaContext::new(index).map_err(device)?;
        let stream = context.new_stream().map_err(device)?;
        let mut id = Vec::new();
        if control.rank() == 0 {
            let made = Id::new().map_err(device)?;
            id = made.internal().iter().map(|byte| byte.cast_unsigned()).collect();
        }
        control.broadcast(&mut id)?;
        let bytes: Vec<core::ffi::c_char> = id.into_iter().map(u8::cast_signed).collect();
        let id = <[core::ffi::c_char; 128]>::try_from(bytes)
            .map_err(|_| RankError::Device("rank 0 sent no NCCL id".into()))?;
        let (rank, world) = (control.rank(), control.world());
        let comm = Comm::from_rank(stream.clone(), rank, world, Id::uninit(id)).map_err(device)?;
        Ok(Self { control, comm, stream })
    }
}

impl Collective for NcclCollective {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn world(&self) -> usize {
        self.control.world()
    }

    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), RankError> {
        if values.is_empty() {
            return Ok(());
        }
        let mut buffer = self.stream.clone_htod(values).map_err(device)?;
        self.comm.all_reduce_in_place(&mut buffer, &ReduceOp::Sum).map_err(device)?;
        self.stream.memcpy_dtoh(&buffer, values).map_err(device)?;
        self.stream.synchronize().map_err(device)
    }

    fn all_reduce_wide(&mut self, values: &mut [f64]) -> Result<(), RankError> {
        self.control.all_reduce_wide(values)
    }

    fn broadcast(&mut self, bytes: &mut Vec<u8>) -> Result<(), RankError> {
        self.control.broadcast(bytes)
    }

    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, RankError> {
        self.control.all_gather(bytes)
    }

    fn finish(&mut self) -> Result<(), RankError> {
        self.control.finish()
    }

    fn abort(&mut self, reason: &str) {
        self.control.abort(reason);
    }
}
