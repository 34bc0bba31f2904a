//! Everything CUDA: the probe and the opening of a device. Kernels are compiled at run time by NVRTC
//! (the `cuda-cpp` back end of cubecl), so the driver, NVRTC and the toolkit's headers are needed.
#![allow(unsafe_code)]

use burn::tensor::Device;
use cubecl as _;
use cudarc::{driver, nvrtc};

use super::DeviceError;

/// Whether CUDA device `index` can be opened on this machine.
pub(super) fn probe(index: usize) -> Result<(), DeviceError> {
    let missing = |reason: String| DeviceError::Unavailable { index, reason };
    // SAFETY: both calls only try to open a shared library by its well-known names.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(missing("no CUDA driver (libcuda.so.1) on this machine".into()));
    }
    if !unsafe { nvrtc::sys::is_culib_present() } {
        return Err(missing("no NVRTC (libnvrtc.so.13), install the CUDA 13 toolkit".into()));
    }
    driver::result::init()
        .map_err(|e| missing(format!("the CUDA driver does not start ({:?})", e.0)))?;
    let count = driver::result::device::get_count()
        .map_err(|e| missing(format!("the CUDA driver lists no devices ({:?})", e.0)))?;
    match usize::try_from(count) {
        Ok(count) if index < count => Ok(()),
        _ => Err(missing(format!("this machine has {count} CUDA device(s)"))),
    }
}

/// Opens a device that [`probe`] found.
pub(super) fn open(index: usize) -> Device {
    Device::cuda(index)
}
