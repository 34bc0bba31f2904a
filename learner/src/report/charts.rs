//! The plots: which metrics they show, and how they are drawn.

use plotters::{
    coord::Shift,
    prelude::{
        BLACK, ChartBuilder, Color as _, DrawingArea, IntoDrawingArea as _, LineSeries,
        PathElement, RGBColor, SVGBackend, SeriesLabelPosition, WHITE,
    },
};
use terminal::Failure;

use super::run::RunData;
use crate::scalars::Series;

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

/// Most lines of one name pattern.
const MOST_LINES: usize = 8;

/// One line of a plot.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    /// How it is called.
    pub label: &'static str,
    /// The name of its number in `metrics.jsonl`; all that begin with it, where it ends in `/`.
    pub name: &'static str,
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

const fn line(label: &'static str, name: &'static str) -> Line {
    Line { label, name }
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
            line("reward of a round", "rollouts/reward"),
        ],
    ),
    chart(
        "evaluation",
        "Held-out tasks",
        "",
        &[
            line("strict success", "evaluation/success"),
            line("reward", "evaluation/reward"),
            line("milestone reward", "evaluation/milestone_reward"),
            line("right codes", "evaluation/code_acc"),
            line("right digits", "evaluation/digit_acc"),
        ],
    ),
    chart("evaluation_loss", "Held-out loss", "nats", &[line("loss", "evaluation/loss")]),
    chart(
        "groups",
        "Groups",
        "",
        &[
            line("share with different rewards", "mixed_groups"),
            line("reward's standard deviation", "reward_std"),
            line("share with different rewards", "rollouts/mixed_groups"),
        ],
    ),
    chart("loss", "Loss", "", &[line("loss", "loss"), line("surrogate loss", "pg_loss")]),
    chart(
        "kl",
        "KL divergence",
        "nats",
        &[line("from the reference", "kl"), line("from the sampling policy", "approx_kl")],
    ),
    chart(
        "clip",
        "Clip fraction",
        "",
        &[
            line("all", "clip_ratio/region_mean"),
            line("all", "clip_frac"),
            line("from below", "clip_ratio/low_mean"),
            line("from above", "clip_ratio/high_mean"),
            line("dual", "clip_ratio/dual_mean"),
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
        "Log-probability gap of learner and sampler",
        "nats",
        &[
            line("mean", "logp_gap"),
            line("largest", "sampling/logp_gap_max"),
            line("mean of a round", "stats/logp_gap_abs"),
        ],
    ),
    chart(
        "audit_margin",
        "Audit, rung 9: deficits",
        "logit / T",
        &[
            line("largest of an id", "sampling/deficit_max"),
            line("largest mean of an episode", "sampling/deficit_mean"),
        ],
    ),
    chart("rejections", "Refused by the audit, by rung", "episodes", &[line("", "rejections/")]),
    chart("staleness", "Staleness", "updates", &[line("staleness", "staleness")]),
    chart(
        "importance",
        "Importance weights",
        "",
        &[line("mean", "importance_mean"), line("share at the cap", "importance_capped")],
    ),
    chart(
        "length",
        "Episode length",
        "sampled ids",
        &[
            line("mean", "completions/mean_length"),
            line("shortest", "completions/min_length"),
            line("longest", "completions/max_length"),
        ],
    ),
    chart("turns", "Turns of an episode", "", &[line("mean", "turns")]),
    chart(
        "malformed",
        "Malformed calls and cut-off episodes",
        "",
        &[
            line("malformed calls", "malformed"),
            line("episodes at the token budget", "completions/clipped_ratio"),
        ],
    ),
    chart(
        "speed",
        "Speed by stage",
        "ids/s",
        &[
            line("rollout", "rollout_tokens_per_second"),
            line("update", "update_tokens_per_second"),
            line("update", "tokens_per_second"),
        ],
    ),
    chart(
        "time",
        "Time of a step by stage",
        "s",
        &[
            line("whole", "step_time"),
            line("rollout", "rollout_seconds"),
            line("update", "update_seconds"),
            line("of it broadcast", "broadcast_seconds"),
            line("audit, beside", "audit_seconds"),
            line("mean update", "seconds_per_update"),
        ],
    ),
    chart(
        "leases",
        "Leases",
        "",
        &[
            line("granted", "leases/granted"),
            line("submitted", "leases/submitted"),
            line("failed", "leases/failed"),
            line("expired", "leases/expired"),
        ],
    ),
    chart("actors", "Actors", "", &[line("connected", "actors")]),
    chart(
        "episodes_by_actor",
        "Episodes of a step by actor",
        "",
        &[line("", "episodes_by_actor/")],
    ),
    chart("memory", "Peak memory", "GiB", &[line("process", "peak_memory_gib")]),
];

impl Line {
    /// The lines that it stands for, with their points: step or update, and number.
    pub(crate) fn of<'a>(&self, series: &'a Series) -> Vec<(String, &'a [(f64, f64)])> {
        if !self.name.ends_with('/') {
            return vec![(self.label.to_owned(), series.get(self.name))];
        }
        let names = series.under(self.name).take(MOST_LINES);
        names.map(|it| (it.to_owned(), series.get(&format!("{}{it}", self.name)))).collect()
    }
}

struct Drawn<'a> {
    label: String,
    colour: RGBColor,
    dashed: bool,
    points: &'a [(f64, f64)],
}

/// A plot of one or two runs, the second one's lines dashed; nothing where no run has a number for it.
pub(super) fn svg(chart: &Chart, runs: &[&RunData]) -> Result<Option<String>, Failure> {
    let mut drawn = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        let lines = chart.lines.iter().flat_map(|line| line.of(&run.series));
        for (at, (label, points)) in lines.filter(|(_, points)| !points.is_empty()).enumerate() {
            let label = match runs.len() {
                1 => label,
                _ => format!("{label} ({})", run.name()),
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

/// Beyond this a number is not drawn: the width of an axis must be a number too.
const MOST: f64 = 1e300;

/// The least and the most of some numbers with a margin, so that a flat line has room around it.
pub(crate) fn range(numbers: impl Iterator<Item = f64>, margin: f64) -> (f64, f64) {
    let (low, high) = numbers
        .filter(|it| it.abs() <= MOST)
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), it| (low.min(it), high.max(it)));
    if low > high {
        return (0.0, 1.0);
    }
    let room = match (high - low, high.abs()) {
        (0.0, 0.0) => 0.5,
        (0.0, size) => size * 0.5,
        (width, _) => width * margin,
    };
    (low - room, high + room)
}

fn draw(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    chart: &Chart,
    lines: &[Drawn<'_>],
) -> Result<(), Box<dyn std::error::Error>> {
    let points = || lines.iter().flat_map(|line| line.points);
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
        // What is left of steps that add up to nothing.
        .y_label_formatter(&|y| number(if y.abs() < (high - low) * 1e-9 { 0.0 } else { *y }))
        .label_style(("sans-serif", 11))
        .draw()?;
    for line in lines {
        let style = line.colour.stroke_width(2);
        let points =
            line.points.iter().copied().filter(|(x, y)| x.abs() <= MOST && y.abs() <= MOST);
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
        .position(legend_place(lines, (left, right), (low, high)))
        .background_style(WHITE.mix(0.8))
        .label_font(("sans-serif", 11))
        .draw()?;
    area.present()?;
    Ok(())
}

/// The corner of a plot in which fewest points lie.
fn legend_place(lines: &[Drawn<'_>], xs: (f64, f64), ys: (f64, f64)) -> SeriesLabelPosition {
    let share = |it: f64, (low, high): (f64, f64)| (it - low) / (high - low).max(f64::MIN_POSITIVE);
    let mut corners = [
        (0, SeriesLabelPosition::UpperRight),
        (0, SeriesLabelPosition::UpperLeft),
        (0, SeriesLabelPosition::LowerRight),
        (0, SeriesLabelPosition::LowerLeft),
    ];
    for (x, y) in lines.iter().flat_map(|line| line.points) {
        let (x, y) = (share(*x, xs), share(*y, ys));
        let [upper_right, upper_left, lower_right, lower_left] = &mut corners;
        let taken = match (x < 0.4, x > 0.6, y < 0.4, y > 0.6) {
            (_, true, _, true) => upper_right,
            (true, _, _, true) => upper_left,
            (_, true, true, _) => lower_right,
            (true, _, true, _) => lower_left,
            _ => continue,
        };
        taken.0 += 1;
    }
    let least = corners.into_iter().min_by_key(|(count, _)| *count);
    least.map_or(SeriesLabelPosition::UpperRight, |(_, corner)| corner)
}

/// A number in few characters.
pub(crate) fn number(value: f64) -> String {
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
        assert_eq!(range([0.0, 0.0].into_iter(), 0.05), (-0.5, 0.5));
        assert_eq!(range([f64::NAN].into_iter(), 0.05), (0.0, 1.0));
    }
}
