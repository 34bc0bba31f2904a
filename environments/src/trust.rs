//! The certificates that this machine trusts.

use std::sync::OnceLock;

use rustls::pki_types::CertificateDer;

/// The roots of trust, read once.
///
/// # Errors
/// There are none.
pub(crate) fn certificates() -> Result<&'static [CertificateDer<'static>], String> {
    static ROOTS: OnceLock<Vec<CertificateDer<'static>>> = OnceLock::new();
    let roots = ROOTS.get_or_init(|| rustls_native_certs::load_native_certs().certs);
    match roots.as_slice() {
        [] => Err("this machine trusts no certificates: install ca-certificates".into()),
        roots => Ok(roots),
    }
}
