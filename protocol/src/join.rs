//! The join string: all that an actor needs to find its learner, to know it, and to be let in.
//!
//! `host:port#` + base64url(`version(1) ‖ sha256(learner certificate)(32) ‖ secret(16)`). The
//! fingerprint and the secret are independent, so who can join cannot pose as the learner.

use std::{fmt, path::Path, str::FromStr};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use rustls::crypto::ring::default_provider;

use crate::{Digest, identity::IdentityError, private};

const FORMAT: u8 = 1;
const SECRET_LEN: usize = 16;
const TOKEN_LEN: usize = 1 + 32 + SECRET_LEN;

/// What an actor proves to know before it is let in. Never printed.
#[derive(Clone)]
pub struct Secret(pub(crate) [u8; SECRET_LEN]);

impl Secret {
    /// The file in a learner's identity directory.
    pub const FILE: &str = "join-secret";

    /// A fresh secret.
    ///
    /// # Errors
    /// No randomness.
    pub fn generate() -> Result<Self, IdentityError> {
        let mut bytes = [0; SECRET_LEN];
        default_provider()
            .secure_random
            .fill(&mut bytes)
            .map_err(|_| IdentityError::Generate("no randomness".to_owned()))?;
        Ok(Self(bytes))
    }

    /// The secret kept in `dir`, made there on first use with mode 0600, so that a learner that
    /// starts again keeps its join string.
    ///
    /// # Errors
    /// The file cannot be read or written, is readable by others, or holds something else.
    pub fn load_or_create(dir: &Path) -> Result<Self, IdentityError> {
        if let Some(secret) = Self::load(dir)? {
            return Ok(secret);
        }
        let secret = Self::generate()?;
        let file = IdentityError::file(dir.join(Self::FILE));
        if private::create(&dir.join(Self::FILE), secret.text().as_bytes()).map_err(&file)? {
            return Ok(secret);
        }
        Self::load(dir)?.ok_or_else(|| file(std::io::ErrorKind::NotFound.into()))
    }

    /// The secret kept in `dir`, if one is.
    ///
    /// # Errors
    /// The file cannot be read, is readable by others, or holds something else.
    pub fn load(dir: &Path) -> Result<Option<Self>, IdentityError> {
        let path = dir.join(Self::FILE);
        let bytes = private::read(&path)
            .map_err(|e| IdentityError::File { path: path.clone(), problem: e.to_string() })?;
        let Some(bytes) = bytes else { return Ok(None) };
        let text = String::from_utf8(bytes).unwrap_or_default();
        let decoded = URL_SAFE_NO_PAD.decode(text.trim_end()).ok();
        decoded.and_then(|bytes| bytes.try_into().ok()).map(|it| Some(Self(it))).ok_or_else(|| {
            let problem = "not a join secret: remove it and a new one is made".to_owned();
            IdentityError::File { path, problem }
        })
    }

    /// Replaces the secret kept in `dir` by a new one. A learner that uses the directory takes it up
    /// by itself.
    ///
    /// # Errors
    /// No randomness, or the file cannot be written.
    pub fn rotate(dir: &Path) -> Result<Self, IdentityError> {
        let secret = Self::generate()?;
        let path = dir.join(Self::FILE);
        private::replace(&path, secret.text().as_bytes()).map_err(IdentityError::file(path))?;
        Ok(secret)
    }

    fn text(&self) -> String {
        format!("{}\n", URL_SAFE_NO_PAD.encode(self.0))
    }
}

/// By their bytes, in time that does not depend on them.
impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).fold(0, |differing, (a, b)| differing | (a ^ b)) == 0
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// A parsed join string. `Debug` hides the secret; only [`Join::reveal`] shows it.
#[derive(Clone, Debug)]
pub struct Join {
    /// Name or address of the learner's machine, without brackets.
    pub host: String,
    /// UDP port.
    pub port: u16,
    /// Fingerprint of the learner's certificate.
    pub learner: Digest,
    /// What lets an actor in.
    pub secret: Secret,
}

/// Why a text is no join string. Never repeats the secret part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// No `#`.
    #[error(
        "join string: no '#': copy the whole string that the learner printed, in single quotes"
    )]
    NoToken,
    /// No `host:port`.
    #[error("join string: {0:?} is not host:port (an IPv6 address goes into brackets)")]
    Address(String),
    /// A port that is none.
    #[error("join string: {0:?} is not a port from 1 to 65535")]
    Port(String),
    /// The token is damaged.
    #[error(
        "join string: the part after '#' has {got} readable characters instead of {want}: copy it whole",
        want = (TOKEN_LEN * 4).div_ceil(3)
    )]
    Token {
        /// Leading characters of the base64url alphabet.
        got: usize,
    },
    /// Made by another release.
    #[error(
        "join string: format {0}, this release reads {FORMAT}: use the same release on both machines"
    )]
    Format(u8),
}

impl Join {
    /// The file in a learner's identity directory that holds its join string as it is now, for
    /// `actor join --join-file`.
    pub const FILE: &str = "join";

    /// Writes the string to `dir`, with mode 0600.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn keep(&self, dir: &Path) -> Result<(), IdentityError> {
        let path = dir.join(Self::FILE);
        let text = format!("{}\n", self.reveal());
        private::replace(&path, text.as_bytes()).map_err(IdentityError::file(path))
    }

    /// The string that a learner wrote to `dir`, if one did.
    ///
    /// # Errors
    /// The file cannot be read, is readable by others, or holds something else.
    pub fn kept(dir: &Path) -> Result<Option<Self>, IdentityError> {
        let path = dir.join(Self::FILE);
        let file = |problem: String| IdentityError::File { path: path.clone(), problem };
        let bytes = private::read(&path).map_err(|e| file(e.to_string()))?;
        let Some(bytes) = bytes else { return Ok(None) };
        let text = String::from_utf8(bytes).unwrap_or_default();
        text.parse().map(Some).map_err(|e: JoinError| file(e.to_string()))
    }

    /// The string itself, the secret included: for the terminal of the learner's owner.
    pub fn reveal(&self) -> String {
        let mut token = Vec::with_capacity(TOKEN_LEN);
        token.push(FORMAT);
        token.extend_from_slice(&self.learner.0);
        token.extend_from_slice(&self.secret.0);
        format!("{}#{}", self.address(), URL_SAFE_NO_PAD.encode(token))
    }

    /// `host:port`, without the secret.
    pub fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl FromStr for Join {
    type Err = JoinError;

    fn from_str(text: &str) -> Result<Self, JoinError> {
        let (address, token) = text.trim().split_once('#').ok_or(JoinError::NoToken)?;
        let shown = || address.chars().take(80).collect::<String>();
        let (host, port) = address.rsplit_once(':').ok_or_else(|| JoinError::Address(shown()))?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let well_formed = match bare {
            Some(inside) => inside.parse::<std::net::Ipv6Addr>().is_ok(),
            None => {
                let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
                (1..=253).contains(&host.len()) && host.bytes().all(allowed)
            }
        };
        if !well_formed {
            return Err(JoinError::Address(shown()));
        }
        let number = port.parse::<u16>().ok().filter(|port| *port > 0);
        let port = number.ok_or_else(|| JoinError::Port(port.chars().take(20).collect()))?;
        let bytes = URL_SAFE_NO_PAD.decode(token).unwrap_or_default();
        let damaged = || {
            let alphabet = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
            JoinError::Token { got: token.chars().take_while(alphabet).count() }
        };
        let (&format, rest) = bytes.split_first().ok_or_else(damaged)?;
        if format != FORMAT && bytes.len() >= TOKEN_LEN {
            return Err(JoinError::Format(format));
        }
        let (learner, secret) = rest.split_first_chunk::<32>().ok_or_else(damaged)?;
        let secret = secret.try_into().map_err(|_| damaged())?;
        Ok(Self {
            host: bare.unwrap_or(host).to_owned(),
            port,
            learner: Digest(*learner),
            secret: Secret(secret),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(host: &str) -> Join {
        Join {
            host: host.to_owned(),
            port: 45_123,
            learner: Digest::of(b"certificate"),
            secret: Secret([7; SECRET_LEN]),
        }
    }

    #[test]
    fn names_and_addresses_round_trip() {
        for host in ["127.0.0.1", "learner.example.org", "::1", "gpu_01"] {
            let text = join(host).reveal();
            let parsed: Join = text.parse().expect("our own");
            assert_eq!(parsed.host, host);
            assert_eq!(parsed.reveal(), text);
            assert_eq!(format!(" {text}\n").parse::<Join>().expect("trimmed").reveal(), text);
        }
        assert_eq!(join("127.0.0.1").reveal().len(), 82);
        assert!(join("::1").reveal().starts_with("[::1]:45123#"));
    }

    #[test]
    fn the_secret_is_not_shown_by_debug_or_by_errors() {
        let join = join("h");
        let debug = format!("{join:?}");
        assert!(debug.contains("Secret(…)") && !debug.contains("7, 7"), "{debug}");
        let text = join.reveal();
        let token = text.split_once('#').expect("there").1;
        let error = format!("h:1#{}", &token[..60]).parse::<Join>().expect_err("cut");
        assert!(!error.to_string().contains(&token[..8]), "{error}");
    }

    #[test]
    fn each_mistake_has_its_own_line() {
        let token = join("h").reveal().split_once('#').expect("there").1.to_owned();
        let other = URL_SAFE_NO_PAD.encode([2; TOKEN_LEN]);
        let cases = [
            (token.clone(), JoinError::NoToken),
            (format!("h#{token}"), JoinError::Address("h".into())),
            (format!("::1:5#{token}"), JoinError::Address("::1:5".into())),
            (format!("[h]:5#{token}"), JoinError::Address("[h]:5".into())),
            (format!("a b:5#{token}"), JoinError::Address("a b:5".into())),
            (format!(":5#{token}"), JoinError::Address(":5".into())),
            (format!("h:0#{token}"), JoinError::Port("0".into())),
            (format!("h:x#{token}"), JoinError::Port("x".into())),
            (format!("h:5#{}", &token[..64]), JoinError::Token { got: 64 }),
            ("h:5#".to_owned(), JoinError::Token { got: 0 }),
            (format!("h:5#{token}AAAA"), JoinError::Token { got: 70 }),
            (format!("h:5#{other}"), JoinError::Format(2)),
        ];
        for (text, want) in cases {
            let error = text.parse::<Join>().expect_err(&text);
            assert_eq!(error, want, "{text}");
            assert!(!error.to_string().contains('\n'));
        }
    }

    #[test]
    fn a_kept_join_string_is_private_and_read_back() {
        let dir = tempfile::tempdir().expect("a directory");
        assert!(Join::kept(dir.path()).expect("readable").is_none());
        for port in [1, 2] {
            let join = Join { port, ..join("h") };
            join.keep(dir.path()).expect("written");
            let kept = Join::kept(dir.path()).expect("readable").expect("there");
            assert_eq!(kept.reveal(), join.reveal());
        }
        let names: Vec<_> = std::fs::read_dir(dir.path()).expect("there").collect();
        assert_eq!(names.len(), 1, "no temporary file stays: {names:?}");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            let path = dir.path().join(Join::FILE);
            assert_eq!(
                std::fs::metadata(&path).expect("there").permissions().mode() & 0o777,
                0o600
            );
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).expect("ours");
            let error = Join::kept(dir.path()).expect_err("readable by others").to_string();
            assert!(error.contains("chmod 600"), "{error}");
        }
    }

    #[test]
    fn a_learner_keeps_its_secret() {
        let dir = tempfile::tempdir().expect("a directory");
        let first = Secret::load_or_create(dir.path()).expect("made");
        assert_eq!(first.0, Secret::load_or_create(dir.path()).expect("read").0);
        let rotated = Secret::rotate(dir.path()).expect("written");
        assert_ne!(first, rotated);
        assert_eq!(Secret::load_or_create(dir.path()).expect("read"), rotated);
        std::fs::write(dir.path().join(Secret::FILE), "short").expect("ours");
        let error = Secret::load_or_create(dir.path()).expect_err("damaged").to_string();
        assert!(error.contains("join-secret") && error.contains("remove"), "{error}");
    }
}
