//! Named axes over the ranks of a world.

use crate::{Error, Result};

/// A grid of ranks with named axes, row-major: the last axis is that of adjacent ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    axes: Vec<(String, usize)>,
}

/// The most axes of a mesh.
const AXES_MAX: usize = 4;

impl Mesh {
    /// A mesh of these axes over `size` ranks.
    ///
    /// # Errors
    /// If the product of the lengths is not `size`, a name is empty or occurs twice, or there are
    /// more than four axes or none.
    pub fn new<'a>(size: usize, axes: impl IntoIterator<Item = (&'a str, usize)>) -> Result<Mesh> {
        let axes: Vec<(String, usize)> = axes
            .into_iter()
            .map(|(name, n)| (name.to_string(), n))
            .collect();
        let shown = axes
            .iter()
            .map(|(name, n)| format!("{name}={n}"))
            .collect::<Vec<_>>();
        let shown = shown.join(" × ");
        if axes.is_empty() || axes.len() > AXES_MAX {
            return Err(Error::Size(format!(
                "a mesh has 1 to {AXES_MAX} axes, not {}",
                axes.len()
            )));
        }
        for (at, (name, _)) in axes.iter().enumerate() {
            if name.is_empty() || axes[..at].iter().any(|(other, _)| other == name) {
                return Err(Error::Size(format!(
                    "the axes of a mesh need different names, but {name:?} is empty or occurs \
                     twice in {shown}"
                )));
            }
        }
        let product = axes
            .iter()
            .try_fold(1_usize, |product, (_, n)| product.checked_mul(*n));
        match product {
            Some(product) if product == size && size > 0 => Ok(Mesh { axes }),
            Some(product) => Err(Error::Size(format!(
                "the mesh {shown} has {product} ranks, but the world has {size}"
            ))),
            None => Err(Error::Size(format!(
                "the mesh {shown} has more ranks than can be counted, but the world has {size}"
            ))),
        }
    }

    /// The axes with their lengths, major first.
    pub fn axes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.axes.iter().map(|(name, n)| (name.as_str(), *n))
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.axes.iter().map(|(_, n)| n).product()
    }

    /// The length of an axis; `None` if there is no such axis.
    pub fn length(&self, axis: &str) -> Option<usize> {
        self.axes().find(|(name, _)| *name == axis).map(|(_, n)| n)
    }

    /// The position of a rank along an axis; `None` if there is no such axis or rank.
    pub fn position(&self, rank: usize, axis: &str) -> Option<usize> {
        let at = self.axes.iter().position(|(name, _)| name == axis)?;
        (rank < self.size()).then(|| rank / self.stride(at) % self.axes[at].1)
    }

    /// The ranks that differ from `rank` along `axis` alone, itself included, by position;
    /// `None` if there is no such axis or rank.
    pub fn group(&self, rank: usize, axis: &str) -> Option<Vec<usize>> {
        let at = self.axes.iter().position(|(name, _)| name == axis)?;
        let first = rank - self.position(rank, axis)? * self.stride(at);
        Some(
            (0..self.axes[at].1)
                .map(|i| first + i * self.stride(at))
                .collect(),
        )
    }

    /// The distance of ranks that are adjacent along an axis.
    fn stride(&self, at: usize) -> usize {
        self.axes[at + 1..].iter().map(|(_, n)| n).product()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_row_major() {
        let mesh = Mesh::new(6, [("data", 2), ("model", 3)]).expect("six ranks");
        assert_eq!(mesh.position(4, "data"), Some(1));
        assert_eq!(mesh.position(4, "model"), Some(1));
        assert_eq!(mesh.group(4, "data"), Some(vec![1, 4]));
        assert_eq!(mesh.group(4, "model"), Some(vec![3, 4, 5]));
        assert_eq!(mesh.position(6, "data"), None);
        assert_eq!(mesh.group(6, "data"), None);
        assert_eq!(mesh.length("pipe"), None);
        assert_eq!((mesh.size(), mesh.length("model")), (6, Some(3)));
    }

    #[test]
    fn wrong_meshes_are_refused_with_their_numbers() {
        let told = |axes: &[(&str, usize)]| {
            Mesh::new(4, axes.iter().copied())
                .expect_err("wrong")
                .to_string()
        };
        assert_eq!(
            told(&[("data", 2), ("model", 3)]),
            "the mesh data=2 × model=3 has 6 ranks, but the world has 4"
        );
        assert!(told(&[]).contains("1 to 4 axes"));
        assert!(told(&[("data", 2), ("data", 2)]).contains("twice"));
        assert!(told(&[("data", 0)]).contains("has 0 ranks"));
        assert!(told(&[("data", usize::MAX), ("model", 2)]).contains("more ranks"));
    }
}
