//! Jinja2's filters and tests, where the template engine's own differ from Python or are missing.
//!
//! What is not here falls back to minijinja.

use minijinja::{
    Environment, Error, Value,
    value::{Kwargs, Rest, ValueIter, ValueKind, from_args},
};

use super::{
    methods::{capitalize, invalid, method, strip},
    python::{is_space, to_str, tojson, type_name},
};

/// Gives `env` Python's rules.
pub(super) fn install(env: &mut Environment<'static>) {
    env.set_unknown_method_callback(method);
    env.set_formatter(|out, _, value| {
        match value.as_str() {
            Some(text) => out.write_str(text)?,
            None => out.write_str(&to_str(value)?)?,
        }
        Ok(())
    });
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| to_str(value).map(Value::from));
    env.add_filter("trim", |value: &Value, chars: Option<&str>| -> Result<Value, Error> {
        Ok(Value::from(strip(&to_str(value)?, chars, true, true)))
    });
    env.add_filter("list", |value: &Value| Ok::<_, Error>(iterate(value)?.collect::<Value>()));
    env.add_filter("join", join);
    env.add_filter("replace", |value: &Value, old: &Value, new: &Value, count: Option<usize>| {
        let (text, old, new) = (to_str(value)?, to_str(old)?, to_str(new)?);
        Ok::<_, Error>(text.replacen(&old, &new, count.unwrap_or(usize::MAX)))
    });
    env.add_filter("upper", |value: &Value| Ok::<_, Error>(to_str(value)?.to_uppercase()));
    env.add_filter("lower", |value: &Value| Ok::<_, Error>(to_str(value)?.to_lowercase()));
    env.add_filter("title", |value: &Value| Ok::<_, Error>(title(&to_str(value)?)));
    env.add_filter("capitalize", |value: &Value| Ok::<_, Error>(capitalize(&to_str(value)?)));
    env.add_filter("truncate", truncate);
    env.add_filter("int", |value: &Value, default: Option<Value>| {
        int(value).unwrap_or_else(|| default.unwrap_or_else(|| Value::from(0)))
    });
    env.add_filter("float", |value: &Value, default: Option<Value>| {
        float(value).map_or_else(|| default.unwrap_or_else(|| Value::from(0.0)), Value::from)
    });
    env.add_filter("round", round);
    for name in ["length", "count"] {
        env.add_filter(name, |value: &Value| match value.len() {
            _ if value.is_undefined() => Ok(0),
            Some(length) => Ok(length),
            None => Err(invalid(format!("object of type '{}' has no len()", type_name(value)))),
        });
    }
    env.add_filter("items", |value: &Value| {
        if value.is_undefined() {
            return Ok(Value::from(Vec::<Value>::new()));
        }
        minijinja::filters::items(value)
    });
    env.add_filter(ITERABLE, |value: &Value| iterate(value).map(|_| value.clone()));
    env.add_filter("wordcount", |value: &Value| {
        Ok::<_, Error>(to_str(value)?.split(is_space).filter(|w| !w.is_empty()).count())
    });

    env.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::String | ValueKind::Seq | ValueKind::Iterable | ValueKind::Map
        )
    });
    env.add_test("iterable", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::String
                | ValueKind::Seq
                | ValueKind::Iterable
                | ValueKind::Map
                | ValueKind::Undefined
        )
    });
    env.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
    });
    env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        Err(invalid(to_str(message)?))
    });
}

/// The filter that loops are made to go through: see [`super::source`].
pub(super) const ITERABLE: &str = "rollcall_iterable";

/// Python refuses to iterate `None`; minijinja takes it for an empty list.
pub(super) fn iterate(value: &Value) -> Result<ValueIter, Error> {
    if value.is_none() {
        return Err(invalid("'NoneType' object is not iterable"));
    }
    value.try_iter()
}

fn join(value: &Value, args: Rest<Value>) -> Result<Value, Error> {
    let (positional, kwargs): (&[Value], Kwargs) = from_args(&args)?;
    let separator = match positional.first() {
        Some(separator) => to_str(separator)?,
        None => kwargs.get::<Option<String>>("d")?.unwrap_or_default(),
    };
    let attribute = match positional.get(1) {
        Some(name) => Some(name.clone()),
        None => kwargs.get::<Option<Value>>("attribute")?,
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    for (i, item) in iterate(value)?.enumerate() {
        if i > 0 {
            out.push_str(&separator);
        }
        let item = match &attribute {
            Some(name) => item.get_item(name)?,
            None => item,
        };
        out.push_str(&to_str(&item)?);
    }
    Ok(Value::from(out))
}

/// `int(value)`, a decimal text cut at its point included.
fn int(value: &Value) -> Option<Value> {
    match value.as_str() {
        Some(text) => {
            let text = text.trim();
            let integer = text.parse::<i128>().ok().map(Value::from);
            integer.or_else(|| text.parse::<f64>().ok().and_then(truncated))
        }
        None if value.kind() == ValueKind::Bool => Some(Value::from(i64::from(value.is_true()))),
        None if value.is_integer() => Some(value.clone()),
        None => f64::try_from(value.clone()).ok().and_then(truncated),
    }
}

fn truncated(x: f64) -> Option<Value> {
    format!("{:.0}", x.trunc()).parse::<i128>().ok().map(Value::from)
}

fn float(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None if value.kind() == ValueKind::Bool => Some(if value.is_true() { 1.0 } else { 0.0 }),
        None => f64::try_from(value.clone()).ok(),
    }
}

/// Jinja's `round`: ties go to the even digit, as Python's do.
fn round(value: &Value, precision: Option<usize>, method: Option<&str>) -> Result<Value, Error> {
    let method = method.unwrap_or("common");
    if value.is_integer() && method == "common" {
        return Ok(value.clone());
    }
    let x = float(value).ok_or_else(|| invalid("round: not a number"))?;
    let precision = precision.unwrap_or(0).min(308);
    let scale = 10f64.powi(i32::try_from(precision).unwrap_or(0));
    Ok(Value::from(match method {
        "common" => format!("{x:.precision$}").parse().unwrap_or(x),
        "ceil" => (x * scale).ceil() / scale,
        "floor" => (x * scale).floor() / scale,
        _ => return Err(invalid("round: method must be common, ceil or floor")),
    }))
}

/// Jinja's `truncate`: shorter texts, and those within the leeway of five, stay as they are.
fn truncate(value: &Value, args: Rest<Value>) -> Result<String, Error> {
    let (positional, kwargs): (&[Value], Kwargs) = from_args(&args)?;
    let argument = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        match positional.get(index) {
            Some(value) => Ok(Some(value.clone())),
            None => kwargs.get::<Option<Value>>(name),
        }
    };
    let count = |value: Option<Value>, default: usize| match value {
        Some(value) if !value.is_none() => usize::try_from(value),
        _ => Ok(default),
    };
    let length = count(argument(0, "length")?, 255)?;
    let kill_words = argument(1, "killwords")?.is_some_and(|v| v.is_true());
    let end = argument(2, "end")?.map_or_else(|| Ok("...".into()), |end| to_str(&end))?;
    let leeway = count(argument(3, "leeway")?, 5)?;
    kwargs.assert_all_used()?;
    let kept = length.checked_sub(end.chars().count());
    let kept = kept.ok_or_else(|| invalid("truncate: the end is longer than the length"))?;
    let text = to_str(value)?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let head: String = text.chars().take(kept).collect();
    let head =
        if kill_words { &head } else { head.rsplit_once(' ').map_or(head.as_str(), |cut| cut.0) };
    Ok(format!("{head}{end}"))
}

/// Jinja's `title`: a letter at the start, or after a space, a dash or an opening bracket, becomes upper
/// case, the others lower case.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut starts = true;
    for c in text.chars() {
        if starts {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
        starts = is_space(c) || "-({[<".contains(c);
    }
    out
}
