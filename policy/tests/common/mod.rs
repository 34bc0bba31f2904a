//! Where shared test data lies, and small helpers of the chat tests.

use std::path::PathBuf;

/// The data root: `ROLLCALL_DATA`, else `shared/data` beside the workspace. `None`, with a message, where
/// there is none.
pub(crate) fn data_root() -> Option<PathBuf> {
    let root = std::env::var_os("ROLLCALL_DATA").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/data"),
        PathBuf::from,
    );
    if root.is_dir() {
        return Some(root);
    }
    eprintln!("skipped: no test data at {} (set ROLLCALL_DATA)", root.display());
    None
}
