//! Who passes adapters on to whom, on the wire.

use std::{collections::BTreeSet, net::SocketAddr};

use serde::{Deserialize, Serialize};

use super::{
    Checker, WireError,
    bounds::{MAX_CHILDREN, MAX_RELAY_LEVEL},
    check_line, decode_body, encode_body, line,
};
use crate::{ActorId, Digest, message::Parent};

#[derive(Serialize, Deserialize)]
struct ParentWire<'a> {
    /// Nothing, or the parent.
    actor: Vec<Digest>,
    address: &'a str,
    level: u8,
}

#[derive(Serialize, Deserialize)]
struct FailedWire<'a> {
    parent: Digest,
    reason: &'a str,
}

/// An address as it travels; nothing is an empty text.
pub(super) fn address_text(address: Option<SocketAddr>) -> String {
    address.map(|address| address.to_string()).unwrap_or_default()
}

/// The address of a text, which has one spelling.
pub(super) fn address(
    check: Checker,
    field: &'static str,
    text: &str,
) -> Result<Option<SocketAddr>, WireError> {
    if text.is_empty() {
        return Ok(None);
    }
    let address = text.parse::<SocketAddr>().ok().filter(|address| address.to_string() == text);
    let address = address.map_or_else(|| check.fail(field, "no address and port"), Ok)?;
    check_address(check, field, &address)?;
    Ok(Some(address))
}

/// An address that a machine may have.
pub(super) fn check_address(
    check: Checker,
    field: &'static str,
    address: &SocketAddr,
) -> Result<(), WireError> {
    check.ensure(address.port() > 0, field, || "port 0".to_owned())?;
    check
        .ensure(!address.ip().is_multicast(), field, || "an address of many machines".to_owned())?;
    let scoped = match address {
        SocketAddr::V4(_) => false,
        SocketAddr::V6(v6) => v6.scope_id() != 0 || v6.flowinfo() != 0,
    };
    check.ensure(!scoped, field, || "an address that holds on one machine only".to_owned())
}

pub(super) fn encode_parent(parent: Option<&Parent>) -> Result<Vec<u8>, WireError> {
    parent.map_or(Ok(()), check_parent)?;
    let wire = ParentWire {
        actor: parent.iter().map(|parent| parent.actor.0).collect(),
        address: &address_text(parent.map(|parent| parent.address)),
        level: parent.map_or(0, |parent| parent.level),
    };
    encode_body("parent", &wire)
}

pub(super) fn decode_parent(body: &[u8]) -> Result<Option<Parent>, WireError> {
    let check = Checker("parent");
    let wire: ParentWire<'_> = decode_body("parent", body)?;
    let address = address(check, "address", wire.address)?;
    match (wire.actor.as_slice(), address) {
        ([], None) => {
            check.ensure(wire.level == 0, "level", || "of no parent".to_owned())?;
            Ok(None)
        }
        ([actor], Some(address)) => {
            let parent = Parent { actor: ActorId(*actor), address, level: wire.level };
            check_parent(&parent)?;
            Ok(Some(parent))
        }
        _ => check.fail("actor", "one parent has one address, none has none"),
    }
}

fn check_parent(parent: &Parent) -> Result<(), WireError> {
    let check = Checker("parent");
    check_address(check, "address", &parent.address)?;
    let zeros = parent.address.ip().is_unspecified();
    check.ensure(!zeros, "address", || "an address of zeros".to_owned())?;
    check.ensure((1..=MAX_RELAY_LEVEL).contains(&parent.level), "level", || {
        format!("{} is outside 1 to {MAX_RELAY_LEVEL}", parent.level)
    })
}

pub(super) fn encode_children(children: &BTreeSet<ActorId>) -> Result<Vec<u8>, WireError> {
    Checker("children").count("actors", children.len(), MAX_CHILDREN)?;
    let actors: Vec<Digest> = children.iter().map(|child| child.0).collect();
    encode_body("children", &actors)
}

pub(super) fn decode_children(body: &[u8]) -> Result<BTreeSet<ActorId>, WireError> {
    let check = Checker("children");
    let actors: Vec<Digest> = decode_body("children", body)?;
    check.count("actors", actors.len(), MAX_CHILDREN)?;
    check.ensure(actors.is_sorted_by(|a, b| a < b), "actors", || "not in order".to_owned())?;
    Ok(actors.into_iter().map(ActorId).collect())
}

pub(super) fn encode_failed(parent: &ActorId, reason: &str) -> Result<Vec<u8>, WireError> {
    encode_body("parent failed", &FailedWire { parent: parent.0, reason: &line(reason) })
}

pub(super) fn decode_failed(body: &[u8]) -> Result<(ActorId, String), WireError> {
    let wire: FailedWire<'_> = decode_body("parent failed", body)?;
    check_line(Checker("parent failed"), "reason", wire.reason)?;
    Ok((ActorId(wire.parent), wire.reason.to_owned()))
}
