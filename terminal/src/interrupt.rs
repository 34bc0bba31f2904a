//! Ctrl-C and SIGTERM as a flag that the run looks at between steps.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::signal::unix::{SignalKind, signal};

/// Set once the user asked the run to stop. The first signal asks for an orderly end; the second ends
/// the process at once.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens from now on.
    ///
    /// # Errors
    /// When the process may not listen to signals.
    pub fn listen(runtime: &tokio::runtime::Runtime) -> io::Result<Self> {
        let flag = Self::default();
        let raised = flag.clone();
        let _guard = runtime.enter();
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        runtime.spawn(async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                if raised.0.swap(true, Ordering::SeqCst) {
                    std::process::exit(130);
                }
            }
        });
        Ok(flag)
    }

    /// Whether a signal came.
    pub fn raised(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
