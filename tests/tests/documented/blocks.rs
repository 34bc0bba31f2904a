//! The command lines of a page.

/// A fenced block of commands.
pub(crate) struct Block {
    /// Page and line.
    pub(crate) place: String,
    /// What it needs, where it is not run.
    pub(crate) needs: Option<String>,
    /// Its command lines.
    pub(crate) lines: Vec<String>,
}

/// What a fence holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fence {
    Commands,
    Plain,
    Other,
}

/// The blocks of a page, and the command-like code spans outside of them.
pub(crate) fn read(page: &str, text: &str) -> (Vec<Block>, Vec<(String, String)>) {
    let (mut blocks, mut spans) = (Vec::new(), Vec::new());
    let mut needs = None;
    let mut fence: Option<(Fence, Block)> = None;
    for (number, line) in (1..).zip(text.lines()) {
        let place = format!("{page}:{number}");
        match (&mut fence, line.trim_start().strip_prefix("```")) {
            (None, Some(language)) => {
                let kind = match language.trim() {
                    "sh" => Fence::Commands,
                    "" => Fence::Plain,
                    _ => Fence::Other,
                };
                let block = Block { place, needs: needs.take(), lines: Vec::new() };
                let marked = block.needs.is_some() && kind != Fence::Commands;
                assert!(!marked, "{}: marks no commands", block.place);
                fence = Some((kind, block));
            }
            (Some(_), Some(_)) => {
                if let Some((Fence::Commands, block)) = fence.take() {
                    blocks.push(block);
                }
                fence = None;
            }
            (Some((Fence::Commands, block)), None) => block.lines.push(line.to_owned()),
            (Some((Fence::Other, _)), None) => {}
            (Some((Fence::Plain, _)), None) => {
                let first = line.split_whitespace().next().unwrap_or_default();
                assert!(
                    !["learner", "actor", "cargo", "$"].contains(&first),
                    "{place}: a command in a block that is not marked as sh"
                );
            }
            (None, None) => {
                let mark = line.trim().strip_prefix("<!-- needs:");
                needs = mark.map(|rest| rest.trim_end_matches("-->").trim().to_owned());
                let code = line.split('`').skip(1).step_by(2);
                spans.extend(code.map(|span| (place.clone(), span.to_owned())));
            }
        }
    }
    (blocks, spans)
}

/// The commands of a block: words of each, without comments, continuations joined, split at `&&`, `;` and `|`.
pub(crate) fn commands(block: &Block) -> Vec<Vec<String>> {
    let text = block.lines.join("\n").replace("\\\n", " ");
    let mut all = Vec::new();
    for line in text.lines() {
        let line = line.strip_prefix("$ ").unwrap_or(line);
        let words = shlex::split(line).unwrap_or_else(|| panic!("{}: {line}", block.place));
        let joints = ["&&", ";", "|", "||", "&"];
        let parts = words.split(|word| joints.contains(&word.as_str()));
        all.extend(parts.filter(|part| !part.is_empty()).map(<[String]>::to_vec));
    }
    all
}

/// Variables in front of a command, and the command without its redirections.
pub(crate) fn plain(words: &[String]) -> (Vec<(String, String)>, Vec<String>) {
    let is_name = |name: &str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let assigned = words.iter().map_while(|word| {
        word.split_once('=').filter(|(name, _)| is_name(name)).map(|(a, b)| (a.into(), b.into()))
    });
    let variables: Vec<(String, String)> = assigned.collect();
    let command = words.iter().skip(variables.len()).map_while(|word| match word.as_str() {
        ">" | ">>" | "2>" | "<" => None,
        word => Some(word.to_owned()),
    });
    let command = command.collect();
    (variables, command)
}

/// What stands after a flag.
pub(crate) fn after<'a>(words: &'a [String], flag: &str) -> Option<&'a str> {
    let at = words.iter().position(|word| word == flag)?;
    words.get(at + 1).map(String::as_str)
}
