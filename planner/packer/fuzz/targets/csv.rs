//! Any text: a table that is read survives writing, and its problem is packed correctly or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use slabwise_packer::csv;
use slabwise_packer::{Violation, check};

fuzz_target!(|text: &str| {
    let Ok(table) = csv::read(text) else { return };
    assert_eq!(csv::read(&csv::write(&table)).as_ref(), Ok(&table));
    if table.problem.items.len() > 200 {
        return;
    }
    match table.problem.pack() {
        Ok(packing) => {
            let verdict = check(&table.problem, &packing);
            assert!(matches!(verdict, Ok(()) | Err(Violation::Capacity(_))), "{verdict:?}");
        }
        Err(error) => assert_eq!(table.problem.verify(), Err(error)),
    }
});
