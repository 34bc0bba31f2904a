//! The plots: which metrics they show, and how they are drawn.

use plotters::{
    coord::Shift,
    prelude::{
        BLACK, ChartBuilder, Color as _, DrawingArea, IntoDrawingArea as _, LineSeries,
        PathElement, RGBColor, SVGBackend, WHITE,
    },
};
use serde_json::Value;
use terminal::Failure;

use super::run::{RunData, position};

/// Width and height of a plot.
const SIZE: (u32, u32) = (520, 300);
/// Colours of a plot's lines, told apart by people who see few colours too (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
];

/// One line of a plot.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    /// How it is called.
    pub label: &'static str,
    /// Where its number stands in a line of `metrics.jsonl`: names separated by `/`.
    pub key: &'static str,
    /// Whether it is one of evaluations.
    pub evaluation: bool,
}

/// A plot over steps or updates.
#[derive(Clone, Copy, Debug)]
pub struct Chart {
    /// Its file's name.
    pub name: &'static str,
    /// Its title.
    pub title: &'static str,
    /// Its unit, empty for shares and plain numbers.
    pub unit: &'static str,
    /// What it shows.
    pub lines: &'static [Line],
}

const fn line(label: &'static str, key: &'static str) -> Line {
    Line { label, key, evaluation: false }
}

const fn evaluated(label: &'static str, key: &'static str) -> Line {
    Line { label, key, evaluation: true }
}

const fn chart(
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    lines: &'static [Line],
) -> Chart {
    Chart { name, title, unit, lines }
}

/// All plots. One without any number in a run is left out.
pub const CHARTS: &[Chart] = &[
    chart(
        "reward",
        "Reward",
        "",
        &[
            line("training reward", "reward"),
            line("strict success", "success"),
            line("milestone reward", "milestone_reward"),
        ],
    ),
    chart(
        "evaluation",
        "Held-out tasks",
        "",
        &[
            evaluated("strict success", "success"),
            evaluated("reward", "reward"),
            evaluated("milestone reward", "milestone_reward"),
        ],
    ),
    chart(
        "groups",
        "Groups",
        "",
        &[
            line("share with different rewards", "mixed_groups"),
            line("reward's standard deviation", "reward_std"),
        ],
    ),
    chart("loss", "Loss", "", &[line("loss", "loss"), line("surrogate loss", "pg_loss")]),
    chart(
        "kl",
        "KL divergence",
        "nats a token",
        &[line("from the reference", "kl"), line("from the sampling policy", "approx_kl")],
    ),
    chart(
        "clip",
        "Clip fraction",
        "",
        &[
            line("all", "clip_fraction"),
            line("all", "clip_frac"),
            line("from below", "clip_fraction_low"),
            line("from above", "clip_fraction_high"),
        ],
    ),
    chart("entropy", "Entropy", "nats", &[line("entropy", "entropy")]),
    chart(
        "gradient",
        "Gradient norm",
        "",
        &[line("policy", "grad_norm"), line("value head", "value_grad_norm")],
    ),
    chart("learning_rate", "Learning rate", "", &[line("learning rate", "learning_rate")]),
    chart(
        "value",
        "Value head",
        "",
        &[line("loss", "value_loss"), line("explained variance", "explained_variance")],
    ),
    chart(
        "logp_gap",
        "Log-probabilities: learner against sampler",
        "nats",
        &[line("mean", "logp_gap"), line("largest", "sampling/logp_gap_max")],
    ),
    chart(
        "audit_margin",
        "Sampling evidence: largest deficit",
        "logit / T",
        &[line("deficit", "sampling/deficit_max")],
    ),
    chart("staleness", "Staleness", "updates", &[line("staleness", "staleness")]),
    chart("length", "Episode length", "ids", &[line("sampled", "completion_tokens")]),
    chart("malformed", "Malformed tool calls", "", &[line("share", "malformed")]),
    chart(
        "speed",
        "Speed",
        "ids/s",
        &[
            line("rollout", "rollout_tokens_per_second"),
            line("update", "update_tokens_per_second"),
            line("update", "tokens_per_second"),
        ],
    ),
    chart(
        "time",
        "Time of a step",
        "s",
        &[
            line("whole", "seconds"),
            line("rollout and audit", "rollout_seconds"),
            line("update and broadcast", "update_seconds"),
            line("mean update", "seconds_per_update"),
        ],
    ),
];

impl Line {
    fn number(&self, record: &Value) -> Option<f64> {
        self.key.split('/').try_fold(record, |at, name| at.get(name))?.as_f64()
    }

    /// The line's points in a run: step or update, and number.
    pub(super) fn points(&self, run: &RunData) -> Vec<(f64, f64)> {
        if self.evaluation {
            let all = run.evaluations.iter();
            return all.filter_map(|(step, it)| Some((*step, self.number(it)?))).collect();
        }
        let mut points = Vec::new();
        for (index, record) in run.steps.iter().enumerate() {
            // Updates of several rounds begin at 1 again.
            let at =
                if record["round"].is_u64() { Some((index + 1) as f64) } else { position(record) };
            points.extend(at.zip(self.number(record)));
        }
        points
    }
}

struct Drawn {
    label: String,
    colour: RGBColor,
    dashed: bool,
    points: Vec<(f64, f64)>,
}

/// A plot of one or two runs, the second one's lines dashed; nothing where no run has a number for it.
pub(super) fn svg(chart: &Chart, runs: &[&RunData]) -> Result<Option<String>, Failure> {
    let mut drawn = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        let lines = chart.lines.iter().map(|line| (line, line.points(run)));
        for (at, (line, points)) in lines.filter(|(_, points)| !points.is_empty()).enumerate() {
            let label = match runs.len() {
                1 => line.label.to_owned(),
                _ => format!("{} ({})", line.label, run.name()),
            };
            let colour = COLOURS[at % COLOURS.len()];
            drawn.push(Drawn { label, colour, dashed: index > 0, points });
        }
    }
    if drawn.is_empty() {
        return Ok(None);
    }
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        draw(&area, chart, &drawn)
            .map_err(|e| Failure::Fault(format!("the plot {}: {e}", chart.name)))?;
    }
    Ok(Some(text))
}

/// The least and the most of some numbers with a margin, so that a flat line has room around it.
fn range(numbers: impl Iterator<Item = f64>, margin: f64) -> (f64, f64) {
    let (low, high) = numbers
        .filter(|it| it.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), it| (low.min(it), high.max(it)));
    if low > high {
        return (0.0, 1.0);
    }
    let room =
        ((high - low) * margin).max(if high == low { high.abs().max(1e-9) * 0.5 } else { 0.0 });
    (low - room, high + room)
}

fn draw(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    chart: &Chart,
    lines: &[Drawn],
) -> Result<(), Box<dyn std::error::Error>> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let (left, right) = range(points().map(|(x, _)| *x), 0.0);
    let (low, high) = range(points().map(|(_, y)| *y), 0.05);
    area.fill(&WHITE)?;
    let title = match chart.unit {
        "" => chart.title.to_owned(),
        unit => format!("{}, {unit}", chart.title),
    };
    let mut context = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 16))
        .margin(8)
        .x_label_area_size(28)
        .y_label_area_size(58)
        .build_cartesian_2d(left..right, low..high)?;
    context
        .configure_mesh()
        .light_line_style(WHITE)
        .bold_line_style(BLACK.mix(0.12))
        .x_labels(8)
        .y_labels(6)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| number(*y))
        .label_style(("sans-serif", 11))
        .draw()?;
    for line in lines {
        let style = line.colour.stroke_width(2);
        let points = line.points.iter().copied().filter(|(_, y)| y.is_finite());
        let colour = line.colour;
        let legend =
            move |(x, y)| PathElement::new(vec![(x, y), (x + 14, y)], colour.stroke_width(2));
        if line.dashed {
            let series = plotters::series::DashedLineSeries::new(points, 5, 4, style);
            context.draw_series(series)?.label(line.label.as_str()).legend(legend);
        } else {
            // One point is no line: a short stroke stands for it.
            let all: Vec<(f64, f64)> = points.collect();
            let all = match all.as_slice() {
                &[(x, y)] => vec![(x - 0.02 * (right - left), y), (x + 0.02 * (right - left), y)],
                _ => all,
            };
            let series = LineSeries::new(all, style);
            context.draw_series(series)?.label(line.label.as_str()).legend(legend);
        }
    }
    context
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .label_font(("sans-serif", 11))
        .draw()?;
    area.present()?;
    Ok(())
}

/// A number in few characters.
pub(super) fn number(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".into()
    } else if !(1e-3..1e5).contains(&size) {
        format!("{value:.1e}")
    } else if size >= 100.0 {
        format!("{value:.0}")
    } else {
        let text = format!("{value:.4}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_whatever_their_size() {
        for (value, text) in [
            (0.0, "0"),
            (0.25, "0.25"),
            (-1.0, "-1"),
            (1234.6, "1235"),
            (1e-7, "1.0e-7"),
            (3.2e6, "3.2e6"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn ranges_have_room_around_a_flat_line_and_survive_what_is_no_number() {
        assert_eq!(range([0.0, 1.0].into_iter(), 0.0), (0.0, 1.0));
        assert_eq!(range([2.0, 2.0].into_iter(), 0.05), (1.0, 3.0));
        assert_eq!(range([f64::NAN].into_iter(), 0.05), (0.0, 1.0));
    }
}
