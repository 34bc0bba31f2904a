//! Who a process is: a self-signed ED25519 certificate that it keeps.
//!
//! There is no certificate authority. Actors know their learner by the fingerprint in the join
//! string; a learner knows its actors by the digest of the certificate whose key they prove to own.

use std::path::{Path, PathBuf};

use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer,
    pem::{self, PemObject as _},
};

use crate::{ActorId, Digest, private};

/// A certificate and its key.
pub struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivatePkcs8KeyDer<'static>,
    fingerprint: Digest,
}

/// Why there is no identity. One line: which file, what is wrong, what to do.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file cannot be read or written, or others may read it.
    #[error("{path}: {problem}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A file holds something else than a key and its certificate.
    #[error("{path}: not an identity ({problem}): remove it and a new one is made")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The operating system gave no randomness, or no key could be made.
    #[error("identity: cannot make a key: {0}")]
    Generate(String),
}

impl IdentityError {
    /// An error of the operating system's about a file.
    pub(crate) fn file(path: PathBuf) -> impl Fn(std::io::Error) -> Self {
        move |error| Self::File { path: path.clone(), problem: error.to_string() }
    }
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        let (certificate, key) = (self.certificate.clone(), self.key.clone_key());
        Self { certificate, key, fingerprint: self.fingerprint }
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity({})", self.fingerprint.short())
    }
}

impl Identity {
    /// The file in an identity's directory.
    pub const FILE: &str = "identity.pem";

    /// A new identity that nothing keeps.
    ///
    /// # Errors
    /// No randomness.
    pub fn generate() -> Result<Self, IdentityError> {
        Ok(Self::generate_with_pem()?.0)
    }

    /// The identity kept in `dir`, made there on first use with mode 0600.
    ///
    /// # Errors
    /// The file cannot be read or written, is readable by others, or holds something else.
    pub fn load_or_create(dir: &Path) -> Result<Self, IdentityError> {
        let path = dir.join(Self::FILE);
        let file = |problem: String| IdentityError::File { path: path.clone(), problem };
        if let Some(bytes) = private::read(&path).map_err(|e| file(e.to_string()))? {
            return Self::from_pem(&path, &bytes);
        }
        let (identity, pem) = Self::generate_with_pem()?;
        if private::create(&path, pem.as_bytes()).map_err(|e| file(e.to_string()))? {
            return Ok(identity);
        }
        // Another process made one in between: that one counts.
        let bytes = private::read(&path).map_err(|e| file(e.to_string()))?;
        Self::from_pem(&path, &bytes.ok_or_else(|| file("vanished".to_owned()))?)
    }

    fn generate_with_pem() -> Result<(Self, String), IdentityError> {
        let fail = |error: rcgen::Error| IdentityError::Generate(error.to_string());
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).map_err(fail)?;
        let params = rcgen::CertificateParams::new(vec!["rollcall".to_owned()]).map_err(fail)?;
        let certificate = params.self_signed(&key).map_err(fail)?;
        let pem = format!("{}{}", key.serialize_pem(), certificate.pem());
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        Ok((Self::new(certificate.der().clone(), key), pem))
    }

    fn from_pem(path: &Path, bytes: &[u8]) -> Result<Self, IdentityError> {
        let malformed = |problem: String| IdentityError::Malformed { path: path.into(), problem };
        let part = |what, error: pem::Error| malformed(format!("{what}: {error}"));
        let key = PrivatePkcs8KeyDer::from_pem_slice(bytes).map_err(|e| part("private key", e))?;
        let certificate =
            CertificateDer::from_pem_slice(bytes).map_err(|e| part("certificate", e))?;
        let identity = Self::new(certificate, key);
        rustls::sign::CertifiedKey::from_der(
            vec![identity.certificate()],
            identity.key(),
            &rustls::crypto::ring::default_provider(),
        )
        .map_err(|error| malformed(error.to_string()))?;
        Ok(identity)
    }

    fn new(certificate: CertificateDer<'static>, key: PrivatePkcs8KeyDer<'static>) -> Self {
        let fingerprint = Digest::of(&certificate);
        Self { certificate, key, fingerprint }
    }

    /// SHA-256 of the certificate's DER bytes.
    pub fn fingerprint(&self) -> Digest {
        self.fingerprint
    }

    /// The id that a learner knows this identity by when it joins as an actor.
    pub fn actor_id(&self) -> ActorId {
        ActorId(self.fingerprint)
    }

    pub(crate) fn certificate(&self) -> CertificateDer<'static> {
        self.certificate.clone()
    }

    /// Keys the stateless resets of this identity's endpoints, in every process that has it.
    pub(crate) fn reset_key(&self) -> Digest {
        Digest::of_parts("rollcall-reset-v1", &[self.key.secret_pkcs8_der()])
    }

    pub(crate) fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(self.key.clone_key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_outlives_its_process_and_only_its_owner_reads_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let first = Identity::load_or_create(dir.path()).expect("made");
        let again = Identity::load_or_create(dir.path()).expect("read");
        assert_eq!(first.actor_id(), again.actor_id());
        assert_ne!(first.actor_id(), Identity::generate().expect("made").actor_id());
        let names: Vec<_> = std::fs::read_dir(dir.path()).expect("there").collect();
        assert_eq!(names.len(), 1, "no temporary file stays: {names:?}");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            let path = dir.path().join(Identity::FILE);
            let mode = std::fs::metadata(&path).expect("there").permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            let open = std::fs::Permissions::from_mode(0o644);
            std::fs::set_permissions(&path, open).expect("ours");
            let error = Identity::load_or_create(dir.path()).expect_err("readable by others");
            assert!(error.to_string().contains("chmod 600"), "{error}");
        }
    }

    #[test]
    fn a_file_that_is_no_identity_is_refused_by_name() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(Identity::FILE);
        let one = Identity::generate_with_pem().expect("made").1;
        let other = Identity::generate_with_pem().expect("made").1;
        let (_, certificate) = other.split_at(other.find("-----BEGIN CERT").expect("there"));
        let (key, _) = one.split_at(one.find("-----BEGIN CERT").expect("there"));
        let halves = format!("{key}{certificate}");
        for bytes in [b"junk".as_slice(), b"", key.as_bytes(), halves.as_bytes()] {
            let _ = std::fs::remove_file(&path);
            private::create(&path, bytes).expect("written");
            let error = Identity::load_or_create(dir.path()).expect_err("no identity").to_string();
            assert!(error.contains("identity.pem") && error.contains("remove it"), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
