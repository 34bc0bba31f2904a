//! A checkpoint's way of writing conversations, as one value that both sides derive streams from.

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashSet},
    fmt,
    ops::Range,
    path::Path,
};

use protocol::FinishReason;
use serde_json::{Map, Value, json};

use super::{
    ChatError, ChatTokenizer, Dialect, ObservationBound, ObservationRole, ParseRules, Rendered,
    Template, TemplateDate, Turn, images, parse_turn,
    python::dumps,
    source, stops,
    tokenizer::special_tokens,
    turns::{DUMMY_USER, TurnShape},
};

/// What a recipe says about conversations.
#[derive(Clone, Debug, Default)]
pub struct ChatOptions {
    /// The tools' JSON schemas, as `{"type": "function", "function": {…}}` or the inner object alone.
    pub tools: Vec<Value>,
    /// The recipe's system text: trusted, control tokens in it count. `{tools}` in it stands for the
    /// tools' JSON, one a line; the template is then not given the tools.
    pub system: Option<String>,
    /// `chat_template_kwargs`: variables for the template, such as `enable_thinking`.
    pub kwargs: Map<String, Value>,
    /// How tool calls are written; `None` takes it from the template.
    pub dialect: Option<Dialect>,
    /// What `strftime_now` prints; `None` leaves the function undefined.
    pub today: Option<TemplateDate>,
    /// How many ids an observation may become; `None` is no bound.
    pub bound: Option<ObservationBound>,
}

/// Prompts, suffixes and parsed turns of one checkpoint under one recipe.
pub struct ChatFormat {
    pub(super) tokenizer: ChatTokenizer,
    pub(super) template: Template,
    /// Variables of every rendering: special tokens, kwargs, tools.
    variables: Map<String, Value>,
    system: Option<System>,
    rules: ParseRules,
    pub(super) stop_ids: Vec<u32>,
    pub(super) image_pad: Option<u32>,
    tools_in_template: bool,
    pub(super) shape: TurnShape,
    pub(super) bound: Option<ObservationBound>,
}

impl fmt::Debug for ChatFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatFormat")
            .field("dialect", &self.rules.dialect)
            .field("shape", &self.shape)
            .field("stops", &self.stop_texts())
            .finish_non_exhaustive()
    }
}

/// Where a system text wants the tools.
const TOOLS_HERE: &str = "{tools}";

impl ChatFormat {
    /// Reads a checkpoint's tokenizer.json, tokenizer_config.json, chat template and stop ids, and tries
    /// the template: a recipe that it cannot serve fails here and not in the middle of a run.
    pub fn load(dir: &Path, options: ChatOptions) -> Result<Self, ChatError> {
        let config = source::read_json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
        let tokenizer = ChatTokenizer::load(dir, &config)?;
        let (text, origin) = source::find_template(dir, &config, !options.tools.is_empty())?;
        let template = Template::new(&text, &origin, options.today)?;
        let stop_ids = stops::stop_ids(dir, &config, &tokenizer)?;
        let image_pad = images::image_pad(dir, &config, &tokenizer)?;
        let rules = ParseRules {
            dialect: options.dialect.unwrap_or_else(|| Dialect::of_template(&text)),
            opens_think: false,
            schemas: schemas(&options.tools)?,
        };
        let mut variables: Map<String, Value> = special_tokens(&config)
            .into_iter()
            .map(|(name, text)| (name, Value::String(text)))
            .collect();
        variables.insert("documents".into(), Value::Null);
        variables.insert("tools".into(), Value::Null);
        variables.extend(options.kwargs);
        let mut format = Self {
            tokenizer,
            template,
            variables,
            system: None,
            rules,
            shape: TurnShape::first(&stop_ids)?,
            stop_ids,
            image_pad,
            tools_in_template: false,
            bound: options.bound,
        };
        format.place_tools(&options.tools, options.system)?;
        format.rules.opens_think = format.prompt_opens_think()?;
        format.choose_shape()?;
        // Such text comes sooner or later: better to learn here that the template cannot be kept apart.
        let forged = format!("a{}b", format.tokenizer.token(format.turn_end()).unwrap_or_default());
        format.prompt(&forged, "")?;
        format.suffix(FinishReason::Stop, &[forged])?;
        Ok(format)
    }

    /// Shows the tools where the recipe's `{tools}` stands, else where the template prints them; else the
    /// system text must have described them in its own words.
    fn place_tools(&mut self, tools: &[Value], system: Option<String>) -> Result<(), ChatError> {
        let placed = system.as_ref().is_some_and(|text| text.contains(TOOLS_HERE));
        self.system = match &system {
            Some(text) if placed => Some(System::describing(text, tools)?),
            Some(text) => Some(System { text: text.clone(), untrusted: Vec::new() }),
            None => None,
        };
        if tools.is_empty() || placed {
            return Ok(());
        }
        let messages = self.opening(DUMMY_USER);
        let without = self.template.render(&self.context(messages.clone(), true))?;
        // Only where there are any: some templates ask no more than whether there is a list.
        self.variables.insert("tools".into(), Value::Array(tools.to_vec()));
        let with = self.template.render(&self.context(messages, true));
        if with.as_ref().is_ok_and(|with| *with != without) {
            self.tools_in_template = true;
            return Ok(());
        }
        self.variables.insert("tools".into(), Value::Null);
        if system.is_none() { Err(ChatError::ToolsNotShown) } else { Ok(()) }
    }

    /// Whether the generation prompt leaves a `<think>` open.
    fn prompt_opens_think(&self) -> Result<bool, ChatError> {
        let rendered = self.render(self.opening(DUMMY_USER), true)?;
        let tail = rendered.untrusted.last().map_or(0, |range| range.end);
        let tail = rendered.text.get(tail..).unwrap_or_default();
        Ok(match (tail.rfind("<think>"), tail.rfind("</think>")) {
            (Some(open), Some(close)) => open > close,
            (open, _) => open.is_some(),
        })
    }

    /// The messages of an episode's start.
    pub(super) fn opening(&self, user: &str) -> Vec<Value> {
        let user = json!({"role": "user", "content": user});
        let system = self.system.iter().map(|s| json!({"role": "system", "content": s.text}));
        system.chain([user]).collect()
    }

    pub(super) fn stop_texts(&self) -> String {
        let texts: Vec<String> =
            self.stop_ids.iter().filter_map(|id| self.tokenizer.token(*id)).collect();
        texts.join(", ")
    }

    pub(super) fn context(
        &self,
        messages: Vec<Value>,
        add_generation_prompt: bool,
    ) -> Map<String, Value> {
        let mut context = self.variables.clone();
        context.insert("messages".into(), Value::Array(messages));
        context.insert("add_generation_prompt".into(), Value::Bool(add_generation_prompt));
        context
    }

    pub(super) fn render(
        &self,
        messages: Vec<Value>,
        generate: bool,
    ) -> Result<Rendered, ChatError> {
        let first = messages.first().and_then(|m| m.get("content")).and_then(Value::as_str);
        let ours = self.system.as_ref().filter(|system| first == Some(&system.text));
        let system = ours.map_or(&[][..], |system| &system.untrusted);
        let context = self.context(messages, generate);
        Rendered::new(&self.template, &self.tokenizer, &context, system)
    }

    /// The ids of an episode's start, the generation prompt included: the system text if there is one,
    /// and a user message with the task's prompt and, right after it, what the environment's reset said.
    pub fn prompt(&self, task_prompt: &str, reset_text: &str) -> Result<Vec<u32>, ChatError> {
        let rendered = self.render(self.opening(&format!("{task_prompt}{reset_text}")), true)?;
        self.tokenizer.encode(&rendered.text, &rendered.untrusted)
    }

    /// The ids between the last sampled id of an assistant turn and the next one's first: the end of the
    /// turn's line, the observations as they are shown ([`ChatFormat::shown`]), and the generation prompt.
    ///
    /// A turn that sampled its stop id gets what follows it. A turn cut by the length limit
    /// ([`FinishReason::Length`]) gets the template's own stop id first, as an external id that carries
    /// no loss; a run that ends such episodes never asks for it.
    ///
    /// # Errors
    /// Without observations there is nothing to answer; where the template reshapes an observation.
    pub fn suffix<S: AsRef<str>>(
        &self,
        finish: FinishReason,
        observations: &[S],
    ) -> Result<Vec<u32>, ChatError> {
        if observations.is_empty() {
            return Err(ChatError::EmptySuffix);
        }
        let shown: Vec<Cow<'_, str>> =
            observations.iter().map(|it| self.shown(it.as_ref())).collect::<Result<_, _>>()?;
        let observations: Vec<&str> = shown.iter().map(AsRef::as_ref).collect();
        let (rendered, (_, end)) = self.after_assistant(&observations)?;
        let mut ids = self.encode_from(&rendered, end.start)?;
        if finish == FinishReason::Stop && !ids.is_empty() {
            ids.remove(0);
        }
        Ok(ids)
    }

    /// Encodes the rest of a rendering from a control token on, so that what follows it is encoded as
    /// in the whole.
    fn encode_from(&self, rendered: &Rendered, start: usize) -> Result<Vec<u32>, ChatError> {
        let untrusted: Vec<Range<usize>> = rendered
            .untrusted
            .iter()
            .filter(|range| range.start >= start)
            .map(|range| range.start - start..range.end - start)
            .collect();
        self.tokenizer.encode(rendered.text.get(start..).unwrap_or_default(), &untrusted)
    }

    /// The ids that a policy would sample to say `text`, its stop id included: for scripted policies and
    /// supervised rows. Control tokens in `text` count.
    pub fn turn(&self, text: &str) -> Result<Vec<u32>, ChatError> {
        // Encoded after a control token, as it stands in a stream.
        let end = self.tokenizer.token(self.turn_end()).unwrap_or_default();
        let mut ids = self.tokenizer.encode(&format!("{end}{text}"), &[])?;
        if ids.first() == Some(&self.turn_end()) {
            ids.remove(0);
        }
        ids.push(self.turn_end());
        Ok(ids)
    }

    /// The ids of a whole conversation as the template writes it. System and assistant messages are
    /// trusted; user and tool messages are not.
    pub fn conversation(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>, ChatError> {
        let rendered = self.render(messages.to_vec(), add_generation_prompt)?;
        self.tokenizer.encode(&rendered.text, &rendered.untrusted)
    }

    /// Reads a sampled turn: `ids` as sampled, the stop id included.
    pub fn parse(&self, ids: &[u32], finish: FinishReason) -> Turn {
        let body = match ids.split_last() {
            Some((last, body)) if finish == FinishReason::Stop && self.stop_ids.contains(last) => {
                body
            }
            _ => ids,
        };
        parse_turn(self.tokenizer.decode(body), ids.len(), finish, &self.rules)
    }

    /// The ids that end an assistant turn; never empty.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The stop id that the template itself writes at the end of an assistant turn.
    pub fn turn_end(&self) -> u32 {
        self.shape.turn_end
    }

    /// The text of `ids`, control tokens included; see [`ChatTokenizer::decode`].
    pub fn decode(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids)
    }

    /// The ids that no untrusted text can become.
    pub fn control_ids(&self) -> BTreeSet<u32> {
        self.tokenizer.control_ids()
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &ChatTokenizer {
        &self.tokenizer
    }

    /// Whether the template prints the tools; otherwise the system text describes them.
    pub fn tools_in_template(&self) -> bool {
        self.tools_in_template
    }

    /// How observations are shown.
    pub fn observation_role(&self) -> ObservationRole {
        self.shape.observations
    }

    /// How tool calls are written.
    pub fn dialect(&self) -> Dialect {
        self.rules.dialect
    }

    /// Whether the policy starts its turns inside an open `<think>`.
    pub fn opens_think(&self) -> bool {
        self.rules.opens_think
    }
}

/// The argument schema of each tool by its name.
fn schemas(tools: &[Value]) -> Result<Map<String, Value>, ChatError> {
    let mut schemas = Map::new();
    let mut names = HashSet::new();
    for (index, tool) in tools.iter().enumerate() {
        let bad = |detail| ChatError::Tool { index, detail };
        let function = tool.get("function").unwrap_or(tool);
        let name = function.get("name").and_then(Value::as_str).ok_or_else(|| bad("no `name`"))?;
        if !names.insert(name) {
            return Err(bad("a second tool of this name"));
        }
        schemas.insert(name.to_owned(), function.get("parameters").cloned().unwrap_or(Value::Null));
    }
    Ok(schemas)
}

/// The system message. The recipe's words are trusted; the tools' JSON, where they hold it, is not.
#[derive(Clone, Debug)]
struct System {
    text: String,
    /// Byte ranges of the tools' JSON.
    untrusted: Vec<Range<usize>>,
}

impl System {
    /// `system` with `{tools}` replaced by the tools' JSON, one a line.
    fn describing(system: &str, tools: &[Value]) -> Result<Self, ChatError> {
        let mut this = Self { text: String::new(), untrusted: Vec::new() };
        for (i, part) in system.split(TOOLS_HERE).enumerate() {
            if i > 0 {
                for (j, tool) in tools.iter().enumerate() {
                    if j > 0 {
                        this.text.push('\n');
                    }
                    let start = this.text.len();
                    this.text.push_str(&dumps(tool)?);
                    this.untrusted.push(start..this.text.len());
                }
            }
            this.text.push_str(part);
        }
        Ok(this)
    }
}
