//! The problem of the search: what can be computed, numbered without gaps, with neighbours in flat lists.

/// Lists of numbers, one per key, behind each other.
#[derive(Clone, Debug, Default)]
pub(super) struct Lists {
    ends: Vec<u32>,
    items: Vec<u32>,
}

impl Lists {
    /// Gathers `(key, item)` pairs by key, each item once per key, in the order of the pairs.
    pub fn gather(keys: usize, pairs: impl Iterator<Item = (u32, u32)> + Clone) -> Lists {
        let mut sorted: Vec<(u32, u32)> = pairs.collect();
        sorted.sort_unstable();
        sorted.dedup();
        let mut lists = Lists { ends: Vec::with_capacity(keys), items: Vec::with_capacity(sorted.len()) };
        let mut at = 0;
        for key in 0..keys as u32 {
            while at < sorted.len() && sorted[at].0 == key {
                lists.items.push(sorted[at].1);
                at += 1;
            }
            lists.ends.push(at as u32);
        }
        lists
    }

    /// The items of `key`, ascending.
    #[inline]
    pub fn of(&self, key: u32) -> &[u32] {
        let start = if key == 0 { 0 } else { self.ends[key as usize - 1] };
        &self.items[start as usize..self.ends[key as usize] as usize]
    }
}

/// What a [`Network`] is made from: one computation.
#[derive(Clone, Debug, Default)]
pub(super) struct Computation {
    pub bytes: u64,
    pub workspace: u64,
    pub cost: u64,
    /// May not run twice.
    pub once: bool,
    /// Computations whose result it reads.
    pub inputs: Vec<u32>,
    /// Computations that no run of this one may follow: they change in place what this one reads.
    pub before: Vec<u32>,
}

/// Computations, each making one buffer. The last is the *sink*: it reads every output, costs nothing and runs at the end.
#[derive(Clone, Debug)]
pub(super) struct Network {
    pub bytes: Vec<i64>,
    pub workspace: Vec<i64>,
    pub cost: Vec<u64>,
    pub once: Vec<bool>,
    pub inputs: Lists,
    pub consumers: Lists,
    /// By computation: those that must come after its last run.
    pub before: Lists,
    /// By computation: those of which no run may follow it.
    pub after: Lists,
    /// Cost of running everything once.
    pub base_cost: u128,
}

impl Network {
    /// `computations` in topological order; `outputs` are live at the end. Byte counts must sum to less than 2^62.
    pub fn new(computations: &[Computation], outputs: &[u32]) -> Network {
        let count = computations.len();
        let sink = Computation { once: true, inputs: outputs.to_vec(), ..Computation::default() };
        let all = || computations.iter().chain([&sink]).enumerate();
        let edges = all().flat_map(|(i, c)| c.inputs.iter().map(move |&j| (i as u32, j)));
        let waits = all().flat_map(|(i, c)| c.before.iter().map(move |&m| (i as u32, m)));
        Network {
            bytes: all().map(|(_, c)| c.bytes as i64).collect(),
            workspace: all().map(|(_, c)| c.workspace as i64).collect(),
            cost: all().map(|(_, c)| c.cost).collect(),
            once: all().map(|(_, c)| c.once).collect(),
            inputs: Lists::gather(count + 1, edges.clone()),
            consumers: Lists::gather(count + 1, edges.map(|(i, j)| (j, i))),
            before: Lists::gather(count + 1, waits.clone()),
            after: Lists::gather(count + 1, waits.map(|(i, m)| (m, i))),
            base_cost: computations.iter().map(|c| u128::from(c.cost)).sum(),
        }
    }

    /// How many computations there are, with the sink.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The computation that reads the outputs.
    pub fn sink(&self) -> u32 {
        self.len() as u32 - 1
    }
}
