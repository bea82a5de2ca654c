//! The order in which the gradients of grains are added.

/// A tree of additions over a number of leaves: its fan-in at each level, from the leaves up. The
/// fan-ins are the prime factors of the number, ascending, so that a power of two is a binary tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tree(Vec<usize>);

impl Tree {
    /// The tree over `leaves` leaves.
    pub fn of(leaves: usize) -> Tree {
        let (mut rest, mut levels) = (leaves, Vec::new());
        let mut prime = 2;
        while rest > 1 {
            while rest.is_multiple_of(prime) {
                levels.push(prime);
                rest /= prime;
            }
            prime += 1;
            if prime * prime > rest && rest > 1 {
                prime = rest;
            }
        }
        Tree(levels)
    }

    /// The additions of leaves one after the other.
    pub fn chain(leaves: usize) -> Tree {
        Tree(vec![leaves])
    }

    /// The subtrees of each of `ranks` ranks and the tree above them; `None` if a rank's leaves are
    /// no whole subtree.
    pub fn split(&self, ranks: usize) -> Option<(Tree, Tree)> {
        (0..=self.0.len()).find_map(|at| {
            let (below, above) = self.0.split_at(at);
            let fits = above.iter().product::<usize>() == ranks;
            fits.then(|| (Tree(below.to_vec()), Tree(above.to_vec())))
        })
    }

    /// The numbers of ranks that can share the leaves, ascending.
    pub fn worlds(&self) -> impl Iterator<Item = usize> {
        (0..=self.0.len())
            .rev()
            .map(|at| self.0[at..].iter().product())
    }

    /// Adds up leaves, which come in their order.
    pub fn sum<T>(&self) -> TreeSum<T> {
        TreeSum {
            waiting: self.0.iter().map(|&fan_in| (fan_in, None)).collect(),
            root: None,
        }
    }
}

/// The sums of the leaves so far: at each level the fan-in, and the siblings that have come with
/// their sum.
pub(crate) struct TreeSum<T> {
    waiting: Vec<(usize, Option<(usize, T)>)>,
    root: Option<T>,
}

impl<T> TreeSum<T> {
    /// Takes the next leaf.
    pub fn push(&mut self, leaf: T, add: &mut impl FnMut(T, T) -> T) {
        let mut value = leaf;
        for (fan_in, waiting) in &mut self.waiting {
            let (come, sum) = match waiting.take() {
                Some((come, sum)) => (come + 1, add(sum, value)),
                None => (1, value),
            };
            if come < *fan_in {
                *waiting = Some((come, sum));
                return;
            }
            value = sum;
        }
        self.root = Some(value);
    }

    /// The sum of all leaves, once all have come.
    pub fn finish(self) -> Option<T> {
        self.root
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(tree: &Tree, leaves: &[String]) -> String {
        let mut sum = tree.sum();
        for leaf in leaves {
            sum.push(leaf.clone(), &mut |a, b| format!("({a}+{b})"));
        }
        sum.finish().unwrap()
    }

    #[test]
    fn every_world_that_shares_the_leaves_adds_them_alike() {
        for leaves in 1..=36 {
            let tree = Tree::of(leaves);
            let names: Vec<String> = (0..leaves).map(|i| i.to_string()).collect();
            let alone = written(&tree, &names);
            for ranks in tree.worlds() {
                let (below, above) = tree.split(ranks).unwrap();
                let each: Vec<String> = names
                    .chunks(leaves / ranks)
                    .map(|own| written(&below, own))
                    .collect();
                assert_eq!(
                    written(&above, &each),
                    alone,
                    "{leaves} leaves, {ranks} ranks"
                );
            }
        }
    }

    #[test]
    fn a_power_of_two_is_a_binary_tree() {
        let leaves: Vec<String> = (0..4).map(|i| i.to_string()).collect();
        assert_eq!(written(&Tree::of(4), &leaves), "((0+1)+(2+3))");
        assert_eq!(Tree::of(12).worlds().collect::<Vec<_>>(), [1, 3, 6, 12]);
        assert_eq!(Tree::of(12).split(4), None);
        assert_eq!(Tree::of(1).worlds().collect::<Vec<_>>(), [1]);
    }
}
