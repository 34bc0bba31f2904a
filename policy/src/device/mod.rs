//! Where tensors live: the user's `--device auto | cpu | cuda:N` turned into a Burn device, after
//! asking the machine whether that device is there. Opening a missing GPU would panic inside the
//! driver bindings, so CUDA is probed first.

#[cfg(feature = "cuda")]
mod cuda;

use std::{fmt, str::FromStr};

pub use burn::tensor::Device;

/// What the user asked for with `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first CUDA device if there is one, else the CPU.
    #[default]
    Auto,
    /// The CPU (Burn's Flex backend).
    Cpu,
    /// A CUDA device by its index.
    Cuda(usize),
}

/// Why a device cannot be had. Each message is one line with its remedy.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Not `auto`, `cpu` or `cuda:N`.
    #[error("device {0:?} is not one of auto, cpu, cuda:N (for example cuda:0)")]
    Unknown(String),
    /// The program was built without CUDA.
    #[error(
        "device cuda:{0}: this program was built without CUDA; use --device cpu, or build with --features cuda"
    )]
    NotBuilt(usize),
    /// The machine has no usable CUDA.
    #[error("device cuda:{index}: {reason}; use --device cpu or auto")]
    Unavailable {
        /// The index that was asked for.
        index: usize,
        /// What the probe found.
        reason: String,
    },
}

impl FromStr for DeviceChoice {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            _ => text
                .strip_prefix("cuda:")
                .filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))
                .and_then(|digits| digits.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| DeviceError::Unknown(text.chars().take(40).collect())),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl DeviceChoice {
    /// `Auto` settled to a device that is there; the others unchanged and unprobed.
    pub fn resolve(self) -> Self {
        match self {
            Self::Auto if probe(0).is_ok() => Self::Cuda(0),
            Self::Auto => Self::Cpu,
            chosen => chosen,
        }
    }

    /// The device of a machine's rank `local`: `Auto` takes CUDA device `local`, or the only one where the
    /// launcher shows each rank no other. One that is not there is no reason to compute on the CPU: opening
    /// it fails.
    #[must_use]
    pub fn of_rank(self, local: usize) -> Self {
        match self {
            Self::Auto => Self::auto_of_rank(local, |index| probe(index).is_ok()),
            chosen => chosen,
        }
    }

    fn auto_of_rank(local: usize, there: impl Fn(usize) -> bool) -> Self {
        match (there(0), there(1)) {
            (false, _) => Self::Cpu,
            (true, false) => Self::Cuda(0),
            (true, true) => Self::Cuda(local),
        }
    }

    /// The Burn device.
    ///
    /// # Errors
    /// A CUDA device that is not there, or a program built without CUDA. `Auto` never fails.
    pub fn open(self) -> Result<Device, DeviceError> {
        match self.resolve() {
            Self::Auto | Self::Cpu => Ok(Device::flex()),
            Self::Cuda(index) => probe(index).map(|()| open_cuda(index)),
        }
    }
}

#[cfg(feature = "cuda")]
use cuda::{open as open_cuda, probe};

#[cfg(not(feature = "cuda"))]
fn probe(index: usize) -> Result<(), DeviceError> {
    Err(DeviceError::NotBuilt(index))
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_index: usize) -> Device {
    Device::flex()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_takes_its_own_device_or_the_only_one_that_it_is_shown() {
        let auto = |local, count| DeviceChoice::auto_of_rank(local, |index| index < count);
        assert_eq!((auto(0, 0), auto(3, 0)), (DeviceChoice::Cpu, DeviceChoice::Cpu));
        assert_eq!((auto(0, 8), auto(3, 8)), (DeviceChoice::Cuda(0), DeviceChoice::Cuda(3)));
        assert_eq!(auto(3, 1), DeviceChoice::Cuda(0), "the launcher has chosen it");
        assert_eq!(auto(3, 2), DeviceChoice::Cuda(3), "refused when it is opened");
        assert_eq!(DeviceChoice::Cpu.of_rank(3), DeviceChoice::Cpu);
    }

    #[test]
    fn device_names_are_read_and_others_refused_in_one_line() {
        assert_eq!("auto".parse::<DeviceChoice>().unwrap(), DeviceChoice::Auto);
        assert_eq!("cuda:3".parse::<DeviceChoice>().unwrap(), DeviceChoice::Cuda(3));
        for wrong in ["", "gpu", "cuda", "cuda:", "cuda:+1", "cuda:x", "cpu "] {
            let message = wrong.parse::<DeviceChoice>().unwrap_err().to_string();
            assert!(message.contains("auto, cpu, cuda:N") && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn auto_opens_on_any_machine() {
        assert!(DeviceChoice::Auto.open().is_ok());
    }

    #[test]
    fn a_missing_gpu_is_one_clear_line() {
        if let Err(error) = DeviceChoice::Cuda(99).open() {
            let message = error.to_string();
            assert!(message.starts_with("device cuda:99: ") && !message.contains('\n'));
        }
    }
}
