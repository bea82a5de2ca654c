//! Purposes of blocks: human-readable names, each stored once.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::Arc;

/// The purpose of a block, as a person knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag {
    /// The tensor.
    pub name: Arc<str>,
    /// The layer's path, such as `body/conv1`; empty outside of layers.
    pub layer: Arc<str>,
    /// The user's line.
    pub location: Option<&'static Location<'static>>,
}

impl Tag {
    /// A name without layer and line.
    pub fn named(name: &str) -> Tag {
        Tag {
            name: name.into(),
            ..Tag::default()
        }
    }
}

/// The number of a [`Tag`] in a pool; the default stands for no tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TagId(pub(crate) u32);

impl TagId {
    /// The position of the tag among all tags of its pool.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// All tags of a pool. They are never forgotten; a program has as many as it has tensors.
#[derive(Clone, Debug)]
pub struct Tags {
    all: Vec<Tag>,
    known: HashMap<Tag, TagId>,
}

impl Default for Tags {
    fn default() -> Tags {
        Tags {
            all: vec![Tag::named("(no name)")],
            known: HashMap::new(),
        }
    }
}

impl Tags {
    /// The number of a tag, which is new if the tag is.
    pub fn id(&mut self, tag: Tag) -> TagId {
        let Tags { all, known } = self;
        *known.entry(tag).or_insert_with_key(|tag| {
            all.push(tag.clone());
            TagId(u32::try_from(all.len() - 1).unwrap_or(0))
        })
    }

    /// All of them, by their numbers.
    pub fn all(&self) -> &[Tag] {
        &self.all
    }

    /// A tag by its number.
    pub(crate) fn get(&self, id: u32) -> &Tag {
        self.all.get(id as usize).unwrap_or(&self.all[0])
    }
}
