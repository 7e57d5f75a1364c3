// Asks the server. Everything that goes wrong becomes an Error with one sentence.

export class Superseded extends Error {}

export async function ask(path, { signal } = {}) {
  let answer;
  try {
    answer = await fetch(path, { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw new Superseded();
    throw new Error("the server does not answer; is `fullshard page` still running?");
  }
  if (answer.status === 409) throw new Superseded();
  if (answer.status === 403) throw new Error("the token is not known any more; open the address that `fullshard page` printed");
  const found = await answer.json();
  if (found.error) throw new Error(found.error);
  return found;
}
