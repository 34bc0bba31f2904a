//! What the office is asked: kinds of questions, their texts in English and German, and how a task's
//! object or the seed names one.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::table::{ORDERS, Order};
use crate::{SpecError, draws::Draws, fields::Fields};

/// A kind of question, by rising difficulty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Quantity times price of one order.
    Total,
    /// Quantity times price less the rebate, of one order.
    Rebate,
    /// The sum of two orders' totals.
    Sum,
}

/// Kinds by name; level `n` has the first `n`.
pub(super) const KINDS: [(&str, Kind); 3] =
    [("total", Kind::Total), ("rebate", Kind::Rebate), ("sum", Kind::Sum)];

/// A language of task texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Language {
    /// English.
    English,
    /// German.
    German,
}

/// Languages by name.
pub(super) const LANGUAGES: [(&str, Language); 2] =
    [("en", Language::English), ("de", Language::German)];

/// One question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) kind: Kind,
    /// One order, or two different ones for a sum.
    pub(super) orders: Vec<u64>,
}

impl Kind {
    fn orders(self) -> usize {
        if self == Self::Sum { 2 } else { 1 }
    }

    fn name(self) -> &'static str {
        KINDS.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

impl Language {
    /// Its name in recipes and tasks.
    pub(super) fn name(self) -> &'static str {
        LANGUAGES.iter().find(|(_, it)| *it == self).map_or("", |(name, _)| name)
    }
}

impl Question {
    /// A question of a level from 1 to 3, about orders that `allowed` lets through.
    pub(super) fn draw(level: usize, draws: &mut Draws, allowed: impl Fn(u64) -> bool) -> Self {
        let kinds = KINDS.get(..level).unwrap_or(&KINDS);
        let kind = draws.pick(kinds).map_or(Kind::Total, |(_, kind)| *kind);
        let mut orders: Vec<u64> = Vec::new();
        while orders.len() < kind.orders() {
            let number = draws.within(*ORDERS.start(), *ORDERS.end());
            if allowed(number) && !orders.contains(&number) {
                orders.push(number);
            }
        }
        Self { kind, orders }
    }

    /// The question that a task's object names by `question` and `orders`; nothing where it names
    /// none.
    pub(super) fn read(fields: &mut Fields<'_>) -> Result<Option<Self>, SpecError> {
        let options = KINDS.map(|(name, kind)| (name, Some(kind)));
        let Some(kind) = fields.choice("question", None, &options)? else { return Ok(None) };
        let orders = fields.distinct_integers("orders", kind.orders(), ORDERS)?;
        Ok(Some(Self { kind, orders }))
    }

    /// The task object that names this question.
    pub(super) fn to_fields(&self, language: Language) -> Map<String, Value> {
        crate::spec::settings(json!({
            "language": language.name(),
            "question": self.kind.name(),
            "orders": self.orders,
        }))
    }

    /// The numbers of an order that its answer is made of.
    pub(super) fn figures(&self, order: &Order) -> Vec<i64> {
        match self.kind {
            Kind::Rebate => vec![order.quantity, order.price, order.rebate],
            Kind::Total | Kind::Sum => vec![order.quantity, order.price],
        }
    }

    /// The right answer; nothing where an order is not in the table.
    pub(super) fn answer(&self, table: &BTreeMap<u64, Order>) -> Option<i64> {
        let values = self.orders.iter().map(|number| {
            let order = table.get(number)?;
            let total = order.quantity * order.price;
            Some(if self.kind == Kind::Rebate { total - order.rebate } else { total })
        });
        values.sum()
    }

    /// The question in words, in one of three phrasings.
    pub(super) fn text(&self, language: Language, phrasing: u64) -> String {
        let first = self.orders.first().copied().unwrap_or_default();
        let second = self.orders.get(1).copied().unwrap_or_default();
        let asked = match (language, self.kind, phrasing % 3) {
            (Language::English, Kind::Total, 0) => {
                format!("What is the total of order {first}, quantity times price?")
            }
            (Language::English, Kind::Total, 1) => {
                format!("Work out quantity times price for order {first}.")
            }
            (Language::English, Kind::Total, _) => {
                format!("The customer of order {first} asks what it costs: quantity times price.")
            }
            (Language::English, Kind::Rebate, 0) => format!(
                "What remains to be paid for order {first}: quantity times price, minus the rebate?"
            ),
            (Language::English, Kind::Rebate, 1) => {
                format!("Work out quantity times price less the rebate for order {first}.")
            }
            (Language::English, Kind::Rebate, _) => {
                format!("Write the bill of order {first}: quantity times price, minus the rebate.")
            }
            (Language::English, Kind::Sum, 0) => format!(
                "What are orders {first} and {second} worth together, each quantity times price?"
            ),
            (Language::English, Kind::Sum, 1) => {
                format!("Add up quantity times price of orders {first} and {second}.")
            }
            (Language::English, Kind::Sum, _) => format!(
                "One bill for orders {first} and {second}: the sum of quantity times price."
            ),
            (Language::German, Kind::Total, 0) => {
                format!("Wie hoch ist der Gesamtbetrag von Auftrag {first}, Menge mal Preis?")
            }
            (Language::German, Kind::Total, 1) => {
                format!("Berechne Menge mal Preis für Auftrag {first}.")
            }
            (Language::German, Kind::Total, _) => {
                format!("Der Kunde von Auftrag {first} fragt, was er kostet: Menge mal Preis.")
            }
            (Language::German, Kind::Rebate, 0) => format!(
                "Was ist für Auftrag {first} zu zahlen: Menge mal Preis, abzüglich des Nachlasses?"
            ),
            (Language::German, Kind::Rebate, 1) => {
                format!("Berechne Menge mal Preis minus Nachlass für Auftrag {first}.")
            }
            (Language::German, Kind::Rebate, _) => {
                format!("Schreibe die Rechnung zu Auftrag {first}: Menge mal Preis minus Nachlass.")
            }
            (Language::German, Kind::Sum, 0) => format!(
                "Was sind die Aufträge {first} und {second} zusammen wert, je Menge mal Preis?"
            ),
            (Language::German, Kind::Sum, 1) => {
                format!("Addiere Menge mal Preis der Aufträge {first} und {second}.")
            }
            (Language::German, Kind::Sum, _) => format!(
                "Eine Rechnung für die Aufträge {first} und {second}: die Summe aus Menge mal Preis."
            ),
        };
        let way = match language {
            Language::English => "Look up, calculate, then submit the result.",
            Language::German => "Schlage nach, rechne und reiche dann das Ergebnis ein.",
        };
        format!("{asked} {way}")
    }
}
