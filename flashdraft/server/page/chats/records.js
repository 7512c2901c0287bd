// Where conversations are kept: the browser's database, or this tab's memory where there is none.
// Both hold the same records: conversations, turns with their texts, tokens with who wrote them.

const NAME = "flashdraft";
const VERSION = 1;
const STORES = ["conversations", "turns", "tokens"];

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const ended = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });

export class DatabaseRecords {
  constructor(database) {
    this.database = database;
    // another tab brings a newer page: it may go on, and this tab's writes are refused from here
    database.onversionchange = () => database.close();
  }

  static async open() {
    const request = indexedDB.open(NAME, VERSION); // throws where storage is forbidden
    request.onupgradeneeded = () => {
      const { result } = request;
      result.createObjectStore("conversations", { keyPath: "id" });
      for (const name of ["turns", "tokens"]) {
        result.createObjectStore(name, { keyPath: "id" }).createIndex("conversation", "conversation");
      }
    };
    return new DatabaseRecords(await done(request));
  }

  conversations() {
    const store = this.database.transaction("conversations").objectStore("conversations");
    return done(store.getAll());
  }

  // [turn, tokens] of a conversation, and its own record; null where it is gone.
  async read(id) {
    const transaction = this.database.transaction(STORES);
    const all = (name) => done(transaction.objectStore(name).index("conversation").getAll(id));
    const record = done(transaction.objectStore("conversations").get(id));
    const [turns, tokens] = await Promise.all([all("turns"), all("tokens")]);
    const tokensOf = new Map(tokens.map((one) => [one.id, one]));
    const found = await record;
    return found ? { record: found, turns: turns.map((turn) => [turn, tokensOf.get(turn.id)]) } : null;
  }

  // Writes turns and what changed of their conversation. False, and nothing written, where another
  // tab has deleted it. Other fields stay as other tabs have left them.
  async write(id, changes, turns, isNew) {
    const transaction = this.database.transaction(STORES, "readwrite");
    const end = ended(transaction);
    end.catch(() => {}); // told below
    const store = transaction.objectStore("conversations");
    const before = await done(store.get(id));
    if (!before && !isNew) return false;
    try {
      store.put({ ...before, ...changes, id });
      for (const { turn, tokens } of turns) {
        transaction.objectStore("turns").put(turn);
        transaction.objectStore("tokens").put(tokens);
      }
    } catch (error) {
      transaction.abort(); // all of it or nothing
      throw error;
    }
    await end;
    return true;
  }

  async remove(id) {
    const transaction = this.database.transaction(STORES, "readwrite");
    const end = ended(transaction);
    transaction.objectStore("conversations").delete(id);
    for (const name of ["turns", "tokens"]) {
      const store = transaction.objectStore(name);
      const keys = await done(store.index("conversation").getAllKeys(id));
      for (const key of keys) store.delete(key);
    }
    await end;
  }

  // Conversations with a turn that `fits`; `isWanted` says no when nobody waits any more.
  async find(fits, isWanted) {
    const found = new Set();
    const request = this.database.transaction("turns").objectStore("turns").openCursor();
    await new Promise((resolve, reject) => {
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor || !isWanted()) {
          resolve();
          return;
        }
        if (fits(cursor.value)) found.add(cursor.value.conversation);
        cursor.continue();
      };
    });
    return found;
  }
}

export class MemoryRecords {
  constructor() {
    this.kept = new Map(); // id: { record, turns: Map of id: [turn, tokens] }
  }

  async conversations() {
    return Array.from(this.kept.values(), ({ record }) => record);
  }

  async read(id) {
    const found = this.kept.get(id);
    return found ? { record: found.record, turns: [...found.turns.values()] } : null;
  }

  async write(id, changes, turns, isNew) {
    const before = this.kept.get(id);
    if (!before && !isNew) return false;
    const after = before ?? { turns: new Map() };
    after.record = { ...after.record, ...changes, id };
    for (const { turn, tokens } of turns) after.turns.set(turn.id, structuredClone([turn, tokens]));
    this.kept.set(id, after);
    return true;
  }

  async remove(id) {
    this.kept.delete(id);
  }

  async find(fits) {
    const fitting = [...this.kept].filter(([, { turns }]) =>
      Array.from(turns.values()).some(([turn]) => fits(turn)));
    return new Set(fitting.map(([id]) => id));
  }
}
