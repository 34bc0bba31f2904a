//! The office's table: orders with whole numbers, drawn from the episode's seed.

use std::collections::BTreeMap;

use crate::draws::Draws;

/// The numbers that orders can have.
pub(super) const ORDERS: std::ops::RangeInclusive<u64> = 100..=999;

const CUSTOMERS: [&str; 16] = [
    "Adler", "Becker", "Carter", "Dietrich", "Evans", "Fischer", "Greene", "Hoffmann", "Iversen",
    "Jensen", "Krüger", "Lehmann", "Müller", "Novak", "Osborne", "Schäfer",
];

/// One order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) number: u64,
    customer: &'static str,
    /// 2 to 9.
    pub(super) quantity: i64,
    /// 10 to 99, so that quantity times price is never quantity plus price.
    pub(super) price: i64,
    /// 1 to 9: always less than quantity times price.
    pub(super) rebate: i64,
}

impl Order {
    fn draw(number: u64, draws: &mut Draws) -> Self {
        let customer = draws.pick(&CUSTOMERS).copied().unwrap_or_default();
        let mut within = |low, high| i64::try_from(draws.within(low, high)).unwrap_or_default();
        let (quantity, price, rebate) = (within(2, 9), within(10, 99), within(1, 9));
        Self { number, customer, quantity, price, rebate }
    }

    /// What a look-up shows.
    pub(super) fn shown(&self) -> String {
        format!(
            r#"{{"order": {}, "customer": "{}", "quantity": {}, "price": {}, "rebate": {}}}"#,
            self.number, self.customer, self.quantity, self.price, self.rebate
        )
    }
}

/// A table of `size` orders, or of those `wanted` where they are more. The wanted ones come first in
/// the draws and are looked up by number like any other.
pub(super) fn draw(wanted: &[u64], size: usize, draws: &mut Draws) -> BTreeMap<u64, Order> {
    let mut table = BTreeMap::new();
    for number in wanted {
        table.insert(*number, Order::draw(*number, draws));
    }
    while table.len() < size {
        let number = draws.within(*ORDERS.start(), *ORDERS.end());
        table.entry(number).or_insert_with(|| Order::draw(number, draws));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_drawn_from_its_seed_and_holds_what_is_asked_for() {
        let make = |seed| draw(&[417, 532], 6, &mut Draws::new("table", seed));
        assert_eq!(make(1), make(1));
        assert_ne!(make(1), make(2));
        for seed in 0..100 {
            let table = make(seed);
            assert_eq!(table.len(), 6);
            assert!(table.contains_key(&417) && table.contains_key(&532));
            for order in table.values() {
                assert!((2..=9).contains(&order.quantity) && (10..=99).contains(&order.price));
                assert!((1..=9).contains(&order.rebate));
            }
        }
    }
}
