//! `learner report`: a run as one page that needs no network, or as plots for papers.
//!
//! Everything comes from the run's directory, finished or not: what is not there yet is not shown.

mod charts;
mod episodes;
mod page;
mod run;

use std::{
    fs,
    path::{Path, PathBuf},
};

use terminal::Failure;

pub use self::charts::{CHARTS, Chart, Line};
pub(crate) use self::charts::{number, range};
use self::{charts::svg, episodes::Browser, page::page, run::RunData};

/// What to write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ReportFormat {
    /// One page with plots, tables and episodes.
    #[default]
    Html,
    /// A directory with each plot as a file.
    Svg,
}

/// What the command line says.
#[derive(Clone, Debug)]
pub struct ReportOptions {
    /// The run's directory.
    pub run: PathBuf,
    /// Another run, shown beside it.
    pub compare: Option<PathBuf>,
    /// The file or directory to write; `report.html` or `plots` in the run's directory by default.
    pub output: Option<PathBuf>,
    /// What to write.
    pub format: ReportFormat,
    /// Episodes of each run that can be read in the page.
    pub episodes: usize,
    /// Bytes that they may take, all of them together.
    pub bytes: usize,
}

/// The page in a run's directory.
pub const REPORT: &str = "report.html";
/// The folder of plots in a run's directory.
pub const PLOTS: &str = "plots";

/// Writes the report and returns where.
///
/// # Errors
/// The directory is not that of a run, or the report cannot be written.
pub fn report(options: &ReportOptions) -> Result<PathBuf, Failure> {
    let run = RunData::read(&options.run)?;
    let other = options.compare.as_deref().map(RunData::read).transpose()?;
    let mut runs = vec![&run];
    runs.extend(&other);
    match options.format {
        ReportFormat::Html => {
            let output = options.output.clone().unwrap_or_else(|| options.run.join(REPORT));
            let each = options.bytes / runs.len();
            let browsers: Result<Vec<Browser>, Failure> =
                runs.iter().map(|run| Browser::read(run, options.episodes, each)).collect();
            write(&output, page(&runs, &browsers?)?.as_bytes())?;
            Ok(output)
        }
        ReportFormat::Svg => {
            let output = options.output.clone().unwrap_or_else(|| options.run.join(PLOTS));
            fs::create_dir_all(&output).map_err(|e| cannot_write(&output, &e))?;
            for chart in CHARTS {
                if let Some(plot) = svg(chart, &runs)? {
                    write(&output.join(format!("{}.svg", chart.name)), plot.as_bytes())?;
                }
            }
            Ok(output)
        }
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    crate::files::write_atomic(path, bytes, false)
        .map_err(|error| Failure::Mistake(format!("{error}; name another place with --output")))
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Failure {
    Failure::Mistake(format!("{}: {error}; name another place with --output", path.display()))
}
