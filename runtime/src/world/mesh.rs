//! Meshes: the ranks of a world, arranged along named axes.

use std::fmt;

use slabwise_kernels::collective::Group;

use super::World;
use crate::error::{Error, Result};
use crate::shape::Dim;

/// The most axes of a mesh.
pub const MAX_AXES: usize = 4;

/// The ranks of a world along named axes, row-major: neighbours along the last axis are neighbours
/// in number.
///
/// A session on a mesh trains data parallel along one axis, which is the first one unless
/// [`Mesh::with_data_axis`] says another: the ranks along it [share](World::share) each batch, and
/// ranks that differ along the other axes alone have the same rows and the same weights. Programs
/// exchange values along any axis by [`Tensor::sum_across`](crate::Tensor::sum_across),
/// [`mean_across`](crate::Tensor::mean_across), [`gather_across`](crate::Tensor::gather_across),
/// [`scatter_across`](crate::Tensor::scatter_across) and
/// [`exchange_across`](crate::Tensor::exchange_across): with the ranks that have the same
/// coordinates along all other axes.
///
/// ```
/// use slabwise::World;
///
/// let meshes = World::local(6)?.into_iter().map(|w| w.mesh([("data", 2), ("model", 3)]));
/// let meshes = meshes.collect::<slabwise::Result<Vec<_>>>()?;
/// assert_eq!((meshes[4].coordinate("data")?, meshes[4].coordinate("model")?), (1, 1));
/// assert_eq!(meshes[4].world().share(10), 5..10);
/// # Ok::<(), slabwise::Error>(())
/// ```
#[derive(Clone)]
pub struct Mesh {
    /// The world with the axes.
    world: World,
    axes: Axes,
}

/// The axes of a mesh, as programs know them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Axes {
    all: [Option<Axis>; MAX_AXES],
    data: usize,
}

/// An axis of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Axis {
    pub name: &'static str,
    /// The ranks along it that have the same coordinates along the others.
    pub group: Group,
}

impl Axes {
    pub fn iter(&self) -> impl Iterator<Item = Axis> {
        self.all.iter().flatten().copied()
    }

    /// The axis of a name.
    ///
    /// # Errors
    /// If there is none, in words.
    pub fn find(&self, name: &str) -> std::result::Result<Axis, String> {
        let found = self.iter().find(|axis| axis.name == name);
        found.ok_or_else(|| format!("no axis \"{name}\"; the mesh has {self}"))
    }

    /// The ranks that share a batch.
    pub fn data(&self) -> Group {
        let own = self.all.get(self.data).copied().flatten();
        own.map_or(Group::all(1), |axis| axis.group)
    }

    /// The ranks along each other axis.
    pub fn others(&self) -> impl Iterator<Item = Group> {
        let others = self.iter().enumerate().filter(|(at, _)| *at != self.data);
        others.map(|(_, axis)| axis.group)
    }
}

impl fmt::Display for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, axis) in self.iter().enumerate() {
            let before = if at > 0 { ", " } else { "" };
            write!(f, "{before}\"{}\" of {}", axis.name, axis.group.ranks)?;
        }
        Ok(())
    }
}

impl World {
    /// Arranges the ranks along axes of these names and sizes. Set the [strategy] before, and the
    /// [grains](Mesh::with_grains) here or before.
    ///
    /// [strategy]: World::with_strategy
    ///
    /// # Errors
    /// If the product of the sizes is not the number of ranks, there is no axis or are more than 4,
    /// a name is empty or there twice, or the ranks of the first axis cannot share the grains.
    pub fn mesh<'a>(&self, axes: impl IntoIterator<Item = (&'a str, usize)>) -> Result<Mesh> {
        let axes: Vec<(&str, usize)> = axes.into_iter().collect();
        let fail = |why: String| Err(Error::Value(why));
        if !(1..=MAX_AXES).contains(&axes.len()) {
            return fail(format!(
                "a mesh of {} axes; it has 1 to {MAX_AXES}",
                axes.len()
            ));
        }
        for (at, (name, size)) in axes.iter().enumerate() {
            if name.is_empty() {
                return fail(format!("axis {at} of a mesh has no name"));
            }
            if axes[..at].iter().any(|(other, _)| other == name) {
                return fail(format!("two axes of a mesh are named \"{name}\""));
            }
            if *size == 0 {
                return fail(format!(
                    "axis \"{name}\" of a mesh has 0 ranks; an axis that is not used has 1"
                ));
            }
        }
        let sizes = axes.iter().map(|(_, size)| *size);
        let product = sizes.clone().try_fold(1_usize, usize::checked_mul);
        if product != Some(self.ranks()) {
            let sizes: Vec<String> = sizes.map(|size| size.to_string()).collect();
            let product = product.map_or("too many".into(), |product| product.to_string());
            return fail(format!(
                "a mesh of {} is {product} ranks, and the world has {}; start as many ranks, or \
                 choose sizes whose product is {}",
                sizes.join(" x "),
                self.ranks(),
                self.ranks()
            ));
        }
        let mut stride = 1;
        let mut all = [None; MAX_AXES];
        for (at, (name, size)) in axes.into_iter().enumerate().rev() {
            let ranks = size as u32;
            let name = Dim::name(name);
            all[at] = Some(Axis {
                name,
                group: Group { ranks, stride },
            });
            stride *= ranks;
        }
        Mesh::of(self.clone(), Axes { all, data: 0 })
    }
}

impl Mesh {
    /// The mesh of a world with these axes.
    fn of(world: World, axes: Axes) -> Result<Mesh> {
        let grains = world.grains;
        let world = World {
            axes: Some(axes),
            ..world
        };
        let world = match grains {
            Some(grains) => world.with_grains(grains as usize)?,
            None => world,
        };
        Ok(Mesh { world, axes })
    }

    /// Lets the ranks along an axis share each batch, instead of those along the first one.
    ///
    /// # Errors
    /// If there is no such axis, or its ranks cannot share the grains.
    pub fn with_data_axis(self, name: &str) -> Result<Mesh> {
        self.find(name)?;
        let data = self.axes.iter().position(|axis| axis.name == name);
        let data = data.unwrap_or(self.axes.data);
        Mesh::of(self.world, Axes { data, ..self.axes })
    }

    /// Sets the number of parts of a batch whose gradients are added in a fixed tree, as
    /// [`World::with_grains`]; the ranks along the data axis share them.
    ///
    /// # Errors
    /// If they cannot.
    pub fn with_grains(self, grains: usize) -> Result<Mesh> {
        let world = self.world.with_grains(grains)?;
        Ok(Mesh { world, ..self })
    }

    /// The names and the sizes of the axes.
    pub fn axes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.axes.iter().map(|axis| (axis.name, axis.group.size()))
    }

    /// The number of ranks along an axis.
    ///
    /// # Errors
    /// If there is no such axis.
    pub fn size(&self, axis: &str) -> Result<usize> {
        Ok(self.find(axis)?.group.size())
    }

    /// The place of this rank along an axis, from 0.
    ///
    /// # Errors
    /// If there is no such axis.
    pub fn coordinate(&self, axis: &str) -> Result<usize> {
        Ok(self.find(axis)?.group.place_of(self.world.rank()))
    }

    /// The world of the mesh, whose [shares](World::share) are those along the data axis.
    pub fn world(&self) -> &World {
        &self.world
    }

    fn find(&self, name: &str) -> Result<Axis> {
        self.axes.find(name).map_err(Error::Value)
    }
}

impl From<Mesh> for World {
    fn from(mesh: Mesh) -> World {
        mesh.world
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of the mesh of {}", self.world.rank(), self.axes)
    }
}
