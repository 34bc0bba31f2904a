//! A virtual environment with the servers that the tests drive, made once under the target directory.

#![allow(dead_code, reason = "each test program uses its part")]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::OnceLock,
};

/// What the servers need. OpenEnv itself is laid beside it, one folder a version, without the packages
/// that only its web pages and its command line need.
const PACKAGES: [&str; 4] = ["fastapi<1", "uvicorn<1", "websockets<18", "fastmcp>=3,<4"];
/// The versions of OpenEnv that are driven: name of the folder, package.
const OPENENV: [(&str, &str); 2] =
    [("openenv-0.3", "openenv-core==0.3.0"), ("openenv-0.10", "openenv==0.10.0")];

/// The versions of the MCP SDK: the one that the packages bring, and a newer one beside them.
pub(crate) const MCP: [&str; 2] = ["mcp-1", "mcp-2"];
const NEWER_MCP: &str = "mcp==2.3.0";

/// The folders of OpenEnv's versions.
pub(crate) fn versions() -> impl Iterator<Item = &'static str> {
    OPENENV.iter().map(|(folder, _)| *folder)
}

/// Whether there is a Python to test with.
pub(crate) fn has_python() -> bool {
    let found =
        Command::new("python3").arg("--version").output().is_ok_and(|it| it.status.success());
    if !found {
        println!("skipped: there is no python3");
    }
    found
}

/// Where it lies, after it was made; nothing, with a message, where there is no Python or no network.
pub(crate) fn folder() -> Option<&'static Path> {
    static MADE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = MADE.get_or_init(|| match make() {
        Ok(folder) => Some(folder),
        Err(problem) => {
            println!("skipped: no virtual environment with servers: {problem}");
            None
        }
    });
    if made.is_none() {
        println!("skipped");
    }
    made.as_deref()
}

pub(crate) fn python(folder: &Path) -> PathBuf {
    folder.join("bin/python")
}

fn make() -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("servers");
    let wanted = format!("{PACKAGES:?} {OPENENV:?} {NEWER_MCP}");
    // Test programs run one after another, but two checkouts may share a target directory.
    fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let lock = fs::File::create(folder.join("lock")).map_err(|error| error.to_string())?;
    lock.lock().map_err(|error| error.to_string())?;
    let mark = folder.join("made-of");
    if fs::read_to_string(&mark).is_ok_and(|made_of| made_of == wanted) {
        return Ok(folder);
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(folder.join("new")))?;
    let pip = |options: &[&str], target: Option<&str>, packages: &[&str]| {
        let mut command = Command::new(folder.join("new/bin/python"));
        command.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
        command.args(options).args(packages);
        if let Some(target) = target {
            command.arg("--target").arg(folder.join("new").join(target));
        }
        run(&mut command)
    };
    pip(&[], None, &PACKAGES)?;
    for (name, package) in OPENENV {
        pip(&["--no-deps"], Some(name), &[package])?;
    }
    pip(&[], Some(MCP[1]), &[NEWER_MCP])?;
    for name in ["bin", "lib", "include", "pyvenv.cfg", "openenv-0.3", "openenv-0.10", MCP[1]] {
        let (from, to) = (folder.join("new").join(name), folder.join(name));
        drop(fs::remove_dir_all(&to));
        fs::rename(from, to).map_err(|error| error.to_string())?;
    }
    fs::write(mark, wanted).map_err(|error| error.to_string())?;
    Ok(folder)
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(said.lines().last().unwrap_or("pip failed").to_owned())
}

/// A running server of the tests, which ends when it is dropped.
pub(crate) struct Server {
    child: Child,
    _stdin: Option<ChildStdin>,
    pub(crate) port: u16,
}

impl Server {
    /// Starts an OpenEnv server; nothing where they are skipped.
    pub(crate) fn start(version: &str, kind: &str, capacity: u32) -> Option<Self> {
        Self::run("openenv_server.py", version, &[kind, &capacity.to_string()])
    }

    /// Starts an MCP server over HTTP; nothing where they are skipped.
    pub(crate) fn start_mcp(version: &str, arguments: &[&str]) -> Option<Self> {
        Self::run("mcp_http_server.py", version, arguments)
    }

    fn run(script: &str, version: &str, arguments: &[&str]) -> Option<Self> {
        let folder = folder()?;
        let servers = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/servers");
        let mut child = Command::new(python(folder))
            .arg(servers.join(script))
            .args(arguments)
            .env("PYTHONPATH", folder.join(version))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("starts");
        let stdin = child.stdin.take();
        let mut line = String::new();
        let stdout = child.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("a port");
        let port = line
            .trim()
            .parse()
            .unwrap_or_else(|_| panic!("{script} {arguments:?} of {version} says {line:?}"));
        Some(Self { child, _stdin: stdin, port })
    }

    pub(crate) fn url(&self) -> String {
        format!("ws://127.0.0.1:{}", self.port)
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("reaped");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
