//! A run on a terminal: curves, actors, the last episode, what the audit refused.

use std::time::Duration;

use ratatui::{
    DefaultTerminal, Frame,
    crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers},
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    symbols::Marker,
    text::{Line, Span},
    widgets::{Axis, Block, Chart, Dataset, GraphType, Paragraph, Wrap},
};
use serde_json::Value;
use terminal::{Failure, Interrupt};

use super::{LOOK, plain, state::State};
use crate::report::{self, CHARTS, number};

/// Characters that a curve needs.
const PLOT: (u16, u16) = (38, 9);
/// Lines of the panels below the curves.
const PANELS: u16 = 9;
/// How long keys are waited for before signals are looked at.
const KEYS: Duration = Duration::from_millis(100);

/// Colours, or none where `NO_COLOR` says so.
#[derive(Clone, Copy, Debug)]
struct Palette {
    colours: bool,
}

impl Palette {
    fn new() -> Self {
        Self { colours: std::env::var_os("NO_COLOR").is_none_or(|it| it.is_empty()) }
    }

    fn of(self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    fn line(self, at: usize) -> Style {
        const COLOURS: [Color; 6] =
            [Color::Cyan, Color::Yellow, Color::Green, Color::Magenta, Color::Blue, Color::Red];
        self.of(COLOURS[at % COLOURS.len()])
    }
}

/// Gives the terminal back, however this ends; ratatui's hook does so before a panic is told.
struct Restored;

impl Drop for Restored {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Shows the run until the user leaves.
pub(super) fn show(mut state: State, interrupt: &Interrupt) -> Result<(), Failure> {
    state.refresh()?;
    let mut terminal = ratatui::try_init().map_err(Failure::fault)?;
    let _restored = Restored;
    run(&mut terminal, &mut state, interrupt)
}

fn run(
    terminal: &mut DefaultTerminal,
    state: &mut State,
    interrupt: &Interrupt,
) -> Result<(), Failure> {
    let palette = Palette::new();
    let (mut first, mut waited) = (0, Duration::ZERO);
    loop {
        let mut shown = 1;
        terminal
            .draw(|frame| shown = draw(frame, state, first, palette))
            .map_err(Failure::fault)?;
        loop {
            if interrupt.raised() {
                return Ok(());
            }
            if event::poll(KEYS).map_err(Failure::fault)? {
                match event::read().map_err(Failure::fault)? {
                    Event::Key(key) if key.kind != KeyEventKind::Release => match key.code {
                        KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                            return Ok(());
                        }
                        KeyCode::Right | KeyCode::Char('n') => first += shown,
                        KeyCode::Left | KeyCode::Char('p') => {
                            first = first.saturating_sub(shown);
                        }
                        _ => continue,
                    },
                    Event::Resize(..) => {}
                    _ => continue,
                }
                break;
            }
            waited += KEYS;
            if waited >= LOOK {
                waited = Duration::ZERO;
                state.refresh()?;
                break;
            }
        }
        // Beyond the last curve there is nothing.
        let curves = CHARTS.iter().filter(|chart| !datasets(chart, state).is_empty()).count();
        if first >= curves {
            first = curves.saturating_sub(1) / shown.max(1) * shown.max(1);
        }
    }
}

/// Draws everything, the curves from the `first` on; returns how many there was room for.
fn draw(frame: &mut Frame<'_>, state: &State, first: usize, palette: Palette) -> usize {
    let [head, plots, panels, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(PLOT.1),
        Constraint::Length(PANELS.min(frame.area().height / 2)),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(heading(state, palette), head);
    let columns = (plots.width / PLOT.0).clamp(1, 4);
    let rows = (plots.height / PLOT.1).max(1);
    let room = usize::from(columns) * usize::from(rows);
    let drawn: Vec<_> = CHARTS
        .iter()
        .map(|chart| (chart, datasets(chart, state)))
        .filter(|(_, lines)| !lines.is_empty())
        .skip(first)
        .take(room)
        .collect();
    if drawn.is_empty() {
        let text = format!("{}: no step has been made yet", state.name());
        frame.render_widget(Paragraph::new(text).block(Block::bordered()), plots);
    }
    let lines = Layout::vertical((0..rows).map(|_| Constraint::Fill(1))).split(plots);
    for (at, (chart, lines_of)) in drawn.iter().enumerate() {
        let Some(row) = lines.get(at / usize::from(columns)) else { continue };
        let places = Layout::horizontal((0..columns).map(|_| Constraint::Fill(1))).split(*row);
        if let Some(place) = places.get(at % usize::from(columns)) {
            curve(frame, *place, chart, lines_of, palette);
        }
    }
    let [actors, refused, episode] = Layout::horizontal([
        Constraint::Percentage(28),
        Constraint::Percentage(28),
        Constraint::Percentage(44),
    ])
    .areas(panels);
    panel(frame, actors, "Actors", actor_lines(state));
    panel(frame, refused, "Refused by the audit", refusal_lines(state));
    panel(frame, episode, "Last episode", episode_lines(state));
    let keys = Line::from("q leave   ←/→ more curves").style(palette.of(Color::DarkGray));
    frame.render_widget(keys, foot);
    room
}

fn heading<'a>(state: &State, palette: Palette) -> Paragraph<'a> {
    let (made, total) = state.steps();
    let of = total.map_or_else(String::new, |total| format!("/{total}"));
    let status = state.status().to_owned();
    let colour = match status.as_str() {
        "completed" => Color::Green,
        "failed" => Color::Red,
        _ => Color::Yellow,
    };
    let mut spans = vec![
        Span::styled(state.name(), Style::new().add_modifier(Modifier::BOLD)),
        Span::raw("  "),
        Span::styled(status, palette.of(colour)),
        Span::raw(format!("  step {made}{of}")),
    ];
    let numbers = [
        ("reward", "reward"),
        ("success", "success"),
        ("loss", "loss"),
        ("held-out", "evaluation/success"),
        ("held-out", "evaluation/code_acc"),
    ];
    for (said, name) in numbers {
        if let Some(last) = state.series.last(name) {
            spans.push(Span::raw(format!("  {said} {}", number(last))));
        }
    }
    if let Some(problem) = &state.problem {
        spans.push(Span::styled(format!("  {}", plain(problem)), palette.of(Color::Red)));
    }
    Paragraph::new(Line::from(spans))
}

/// The lines of a chart that have points.
fn datasets<'a>(chart: &report::Chart, state: &'a State) -> Vec<(String, &'a [(f64, f64)])> {
    let lines = chart.lines.iter().flat_map(|line| line.of(&state.series));
    lines.filter(|(_, points)| !points.is_empty()).collect()
}

fn curve(
    frame: &mut Frame<'_>,
    place: Rect,
    chart: &report::Chart,
    lines: &[(String, &[(f64, f64)])],
    palette: Palette,
) {
    let points = || lines.iter().flat_map(|(_, points)| *points);
    let (left, right) = report::range(points().map(|(x, _)| *x), 0.0);
    let (low, high) = report::range(points().map(|(_, y)| *y), 0.05);
    let mut legend = Vec::new();
    let sets = lines.iter().enumerate().map(|(at, (label, points))| {
        // One point is no line.
        let kind = if points.len() == 1 { GraphType::Scatter } else { GraphType::Line };
        let last = points.last().map_or(0.0, |(_, y)| *y);
        legend.push(Span::styled(format!(" {} {} ", plain(label), number(last)), palette.line(at)));
        Dataset::default()
            .marker(Marker::Braille)
            .graph_type(kind)
            .style(palette.line(at))
            .data(points)
    });
    let unit = if chart.unit.is_empty() { String::new() } else { format!(", {}", chart.unit) };
    let sets = sets.collect();
    let title = format!(" {}{unit} ", chart.title);
    let widget = Chart::new(sets)
        .block(Block::bordered().title(title).title_bottom(Line::from(legend)))
        .x_axis(
            Axis::default()
                .bounds([left, right])
                .labels([format!("{left:.0}"), format!("{right:.0}")]),
        )
        .y_axis(Axis::default().bounds([low, high]).labels([number(low), number(high)]));
    frame.render_widget(widget, place);
}

fn panel(frame: &mut Frame<'_>, place: Rect, title: &str, lines: Vec<String>) {
    let text: Vec<Line<'_>> = lines.into_iter().map(Line::from).collect();
    let widget = Paragraph::new(text)
        .wrap(Wrap { trim: false })
        .block(Block::bordered().title(format!(" {title} ")));
    frame.render_widget(widget, place);
}

fn actor_lines(state: &State) -> Vec<String> {
    let last = |name: &str| {
        let written = state.manifest.pointer(&format!("/{name}")).and_then(Value::as_f64);
        written.or_else(|| state.series.last(name)).map(|it| format!("{it:.0}"))
    };
    let mut lines = Vec::new();
    lines.extend(last("actors").map(|it| format!("{it} connected")));
    let leases = ["granted", "submitted", "failed", "expired"];
    let leases = leases.iter().filter_map(|it| Some((it, last(&format!("leases/{it}"))?)));
    lines.extend(leases.map(|(name, count)| format!("leases {name} {count}")));
    for actor in state.series.under("episodes_by_actor/") {
        let name = format!("episodes_by_actor/{actor}");
        lines.extend(last(&name).map(|it| format!("{}: {it} episodes", plain(actor))));
    }
    for join in state.joins.iter().rev() {
        let text = |key: &str| plain(join[key].as_str().unwrap_or_default());
        let actor: String = text("actor").chars().take(12).collect();
        lines.push(format!("{} {actor}", text("outcome")));
    }
    if lines.is_empty() {
        lines.push("none".into());
    }
    lines
}

fn refusal_lines(state: &State) -> Vec<String> {
    let mut lines: Vec<String> =
        state.rejections().iter().map(|(rung, count)| format!("{rung} {count}")).collect();
    if lines.is_empty() {
        lines.push("nothing".into());
    }
    lines.extend(state.refusals().rev());
    lines
}

fn episode_lines(state: &State) -> Vec<String> {
    let Some(row) = &state.episode else { return vec!["none".into()] };
    let text = |value: &Value| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        plain(&text)
    };
    let mut lines = vec![format!(
        "{} step {} reward {} end {}",
        text(&row["task_id"]),
        text(&row["optimizer_step"]),
        text(&row["training_reward"]),
        text(&row["end"]),
    )];
    for message in row["messages"].as_array().into_iter().flatten() {
        lines.push(format!("{}: {}", text(&message["role"]), text(&message["content"])));
    }
    lines
}
