//! Stands in for `http` in builds without the cargo feature `mcp-http`: URLs are refused by name.

use serde_json::{Map, Value};

use super::session::{Deadline, Failed, Link};
use crate::{SpecError, fields::Fields};

/// There is none.
#[derive(Debug)]
pub(super) enum Endpoint {}

/// There is none.
#[derive(Debug)]
pub(super) enum Connection {}

impl Endpoint {
    pub(super) fn read(fields: &mut Fields<'_>, _: &str) -> Result<Self, SpecError> {
        let url = fields.text("url", "a server's URL")?;
        Err(SpecError::Value {
            field: "environment.mcp.url".into(),
            expected:
                "absent in this build, which has no cargo feature mcp-http: build with it, or \
                       set environment.mcp.command"
                    .into(),
            found: crate::fields::shown(&url.into()),
        })
    }

    pub(super) fn url(&self) -> &str {
        match *self {}
    }

    pub(super) fn connect(&self, _: &str, _: &str) -> Result<Connection, String> {
        match *self {}
    }
}

impl Link for Connection {
    fn send(&mut self, _: &Value, _: Deadline) -> Result<(), Failed> {
        match *self {}
    }

    fn receive(&mut self, _: Deadline) -> Result<Map<String, Value>, Failed> {
        match *self {}
    }

    fn agreed(&mut self, _: &str) -> Result<(), Failed> {
        match *self {}
    }

    fn with_words(&mut self, _: &str) -> String {
        match *self {}
    }
}
